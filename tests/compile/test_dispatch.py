# SPDX-License-Identifier: MIT
"""Compiled calls of dispatched functions: who runs, when it is decided, what is checked."""

from __future__ import annotations

import pytest
import torch

from fla.backends import BaseBackend, dispatch, explain, last_decision, reference_only, register, trace, use_backend


def _check(x, gain, cu_seqlens):
    if x.dim() != 2:
        raise ValueError(f"`x` must have shape [T, D], got {list(x.shape)}")
    if cu_seqlens is not None and type(cu_seqlens) is torch.Tensor and cu_seqlens[0] != 0:
        raise ValueError(f"`cu_seqlens` must start at 0, got {cu_seqlens[0].item()}")


@dispatch(
    "compile_test",
    validate=_check,
    outputs=lambda x, gain, cu_seqlens: torch.empty_like(x),
    renamed={"old_gain": "gain"},
)
def squared(x: torch.Tensor, gain: float = 1.0, *, cu_seqlens: torch.LongTensor | None = None) -> torch.Tensor:
    return gain * x * x


class Times100(BaseBackend):
    """Wrong by a factor of 100, so that results show who ran."""

    backend_type = "times100"
    env_var = "FLA_TIMES100"

    def squared(self, x, gain=1.0, *, cu_seqlens=None):
        return 100 * gain * x * x


class Trains(Times100):
    backend_type = "trains"
    priority = 6

    def squared_fwd(self, x, gain=1.0, *, cu_seqlens=None):
        return 100 * gain * x * x, ()

    def squared_bwd(self, args, saved, grads, needed):
        x, gain, _ = args
        return [200 * gain * x * grads[0], *([None] if len(needed) > 1 else [])]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    from fla.backends.registry import REGISTRY

    torch._dynamo.reset()
    before = REGISTRY.snapshot()
    yield
    with REGISTRY.lock:
        REGISTRY._rows.clear()
        REGISTRY._rows.update(before)
        for ops in REGISTRY._ops.values():
            for op in ops:
                op.invalidate()


def compiled(**kwargs):
    return torch.compile(lambda x: squared(x, **kwargs), fullgraph=True, backend="aot_eager")


def x_(grad=False):
    return torch.arange(6.0).view(3, 2).requires_grad_(grad)


def test_backend_is_chosen_at_run_time_and_not_at_trace_time(monkeypatch):
    f, x = compiled(), x_()
    assert torch.equal(f(x), x * x)
    assert last_decision().backend == "torch"
    register("compile_test", Times100())
    count = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert torch.equal(f(x), 100 * x * x)
    assert last_decision().backend == "times100"
    monkeypatch.setenv("FLA_TIMES100", "0")
    assert torch.equal(f(x), x * x)
    monkeypatch.delenv("FLA_TIMES100")
    with reference_only():
        assert torch.equal(f(x), x * x)
    with use_backend("torch"):
        assert torch.equal(f(x), x * x)
    assert torch.equal(f(x), 100 * x * x)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == count  # none of this compiled again


def test_training_runs_core_where_the_backend_has_no_pair():
    register("compile_test", Times100())
    x = x_(grad=True)
    f = compiled(gain=2.0)
    y = f(x)
    assert torch.equal(y, 2 * x * x)
    assert last_decision().backend == explain(squared, x).compiled_training == "torch"
    y.sum().backward()
    assert torch.equal(x.grad, 4 * x)
    with torch.no_grad():
        assert torch.equal(f(x), 200 * x * x)


def test_training_runs_a_backend_with_forward_and_backward():
    register("compile_test", Times100())
    register("compile_test", Trains())
    x = x_(grad=True)
    with trace() as taken:
        y = compiled(gain=2.0)(x)
    assert [str(c.decision) for c in taken.calls] == ["compile_test.squared -> trains"]
    assert torch.equal(y, 200 * x * x)
    assert last_decision().backend == explain(squared, x).compiled_training == "trains"
    y.sum().backward()
    assert torch.equal(x.grad, 400 * x)
    x.grad = None
    with reference_only():
        y = compiled()(x)
        y.sum().backward()
    assert torch.equal(x.grad, 2 * x)


def test_backend_that_saves_what_the_op_did_not_declare_is_refused():
    class Hoards(Trains):
        backend_type = "hoards"

        def squared_fwd(self, x, gain=1.0, *, cu_seqlens=None):
            return gain * x * x, (x * 2,)

    register("compile_test", Hoards())
    with pytest.raises(RuntimeError, match=r"hoards\.squared_fwd saved \[\(\(3, 2\), torch\.float32\)\]"):
        compiled()(x_(grad=True))


@pytest.mark.parametrize("wrong", [lambda x: x.double(), lambda x: x[:1]])
def test_backend_that_returns_another_dtype_or_shape_is_named(wrong):
    class Wrong(Times100):
        backend_type = "wrong"

        def squared(self, x, gain=1.0, *, cu_seqlens=None):
            return wrong(x)

    register("compile_test", Wrong())
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"wrong.squared returned .* declared as"):
        compiled()(x_())


def test_backend_that_fails_in_a_compiled_call_is_quarantined_and_core_runs():
    class Broken(BaseBackend):
        backend_type = "broken"

        def squared(self, x, gain=1.0, *, cu_seqlens=None):
            raise OSError("no such kernel")

    register("compile_test", Broken())
    f, x = compiled(), x_()
    with pytest.warns(RuntimeWarning, match="broken.*no such kernel"):
        assert torch.equal(f(x), x * x)
    assert torch.equal(f(x), x * x)


def test_wrong_shape_is_named_while_tracing():
    with pytest.raises(Exception, match=r"`x` must have shape \[T, D\], got \[3\]"):
        compiled()(torch.ones(3))


def test_values_of_index_tensors_are_checked_when_the_graph_runs():
    f = torch.compile(lambda x, cu: squared(x, cu_seqlens=cu), fullgraph=True, backend="aot_eager")
    x = x_()
    assert torch.equal(f(x, torch.tensor([0, 3])), x * x)
    with pytest.raises(ValueError, match="`cu_seqlens` must start at 0, got 1"):
        f(x, torch.tensor([1, 3]))


def test_old_keyword_works_in_a_compiled_region():
    x = x_()
    f = torch.compile(lambda x: squared(x, old_gain=3.0), fullgraph=True, backend="aot_eager")
    assert torch.equal(f(x), 3 * x * x)


def test_module_that_calls_an_op_compiles_whole_and_trains():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)

        def forward(self, x):
            return squared(self.linear(x), gain=0.5) + x

    torch.manual_seed(0)
    layer, x = Layer(), x_()
    layer(x).sum().backward()
    expected = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    whole = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        layer.zero_grad()
        whole(x).sum().backward()
        torch.testing.assert_close([p.grad for p in layer.parameters()], expected)


def test_exported_program_holds_the_op_and_runs():
    class Layer(torch.nn.Module):
        def forward(self, x):
            return squared(x) + 1

    x = x_()
    program = torch.export.export(Layer(), (x,))
    assert "fla.compile_test_squared" in str(program.graph_module.code)
    assert torch.equal(program.module()(x), x * x + 1)


def test_wrapper_itself_can_be_compiled():
    x = x_(grad=True)
    y = torch.compile(squared, fullgraph=True, backend="aot_eager")(x, gain=2.0)
    assert torch.equal(y, 2 * x * x)
    y.sum().backward()
    assert torch.equal(x.grad, 4 * x)


def test_checkpoint_inside_of_the_compiled_region():
    def block(x):
        return squared(x.sin()).cos()

    def model(x):
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)

    x = x_(grad=True)
    torch.compile(model, fullgraph=True, backend="aot_eager")(x).sum().backward()
    found, x.grad = x.grad, None
    model(x).sum().backward()
    torch.testing.assert_close(found, x.grad)


def test_both_passes_are_traced_by_compiled_autograd():
    x = x_(grad=True)
    f = compiled()
    with torch._dynamo.utils.maybe_enable_compiled_autograd(True, fullgraph=True):
        f(x).sum().backward()
    assert torch.equal(x.grad, 2 * x)


def test_processes_agree_on_names_and_schemas():
    from fla.backends._compile import register as register_custom_op

    overload = getattr(torch.ops.fla, register_custom_op(squared.op)).default
    assert str(overload._schema) == (
        "fla::compile_test_squared(Tensor x, float gain, Tensor? cu_seqlens, bool differentiable) -> Tensor[]"
    )
