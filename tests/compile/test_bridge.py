# SPDX-License-Identifier: MIT
"""The torch.compile bridge on toy ops: what a graph holds, what it returns, what flows back."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

_spec = importlib.util.spec_from_file_location("compile_toys", Path(__file__).with_name("toys.py"))
assert _spec is not None
assert _spec.loader is not None
toys = importlib.util.module_from_spec(_spec)
sys.modules["compile_toys"] = toys
_spec.loader.exec_module(toys)

BACKENDS = ["eager", "aot_eager"]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    torch.manual_seed(0)


def rand(*shape: int, grad: bool = True, **kwargs: Any) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=grad, **kwargs)


class Counter:
    """A Dynamo backend that counts graphs and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, example: Any) -> Any:
        self.graphs.append(graph)
        return graph

    def boxed(self, graph: torch.fx.GraphModule, example: Any) -> Any:
        return make_boxed_func(self(graph, example))


def gradients(fn, inputs, *args, **kwargs):
    """Outputs and gradients of a weighted sum of all float outputs."""
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    flat = torch.utils._pytree.tree_leaves(fn(*leaves, *args, **kwargs))
    outs = [o for o in flat if isinstance(o, torch.Tensor)]
    loss = sum((o * torch.arange(o.numel(), dtype=o.dtype).view(o.shape)).sum() for o in outs)
    loss.backward()
    return [o.detach() for o in outs], [x.grad for x in leaves]


@pytest.mark.parametrize("backend", [*BACKENDS, "inductor"])
def test_output_and_gradients_equal_eager(backend):
    op = toys.make_decayed()
    inputs = (rand(2, 5, 4), rand(2, 5, 4))
    compiled = torch.compile(lambda q, v: op(q * 2, v, output_final_state=True), fullgraph=True, backend=backend)
    eager = lambda q, v: toys.decayed(q * 2, v, output_final_state=True)
    torch.testing.assert_close(gradients(compiled, inputs), gradients(eager, inputs))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("return_h", [False, True])
@pytest.mark.parametrize("state", ["none", "both", "first"])
def test_tuples_of_tensors_pass_in_and_out(backend, return_h, state):
    op = toys.make_stateful()
    inputs = (rand(2, 5, 4), rand(2, 4), rand(2, 4))

    def call(fn):
        def run(q, kv, z):
            given = {"none": None, "both": (kv, z), "first": [kv, None]}[state]
            # The sum keeps every input in the graph, so that gradients exist on both sides.
            return fn(q, given, return_h), kv + z

        return run

    compiled = torch.compile(call(op), fullgraph=True, backend=backend)
    result, _ = compiled(*inputs)
    assert len(result) == 2 + return_h
    assert isinstance(result[1], tuple)
    torch.testing.assert_close(gradients(compiled, inputs), gradients(call(toys.stateful), inputs))


def test_absent_final_state_is_none_and_absent_gradient_is_skipped():
    op = toys.make_decayed()
    compiled = torch.compile(lambda q, v, **k: op(q, v, **k), fullgraph=True, backend="aot_eager")
    q, v = rand(1, 3, 2), rand(1, 3, 2, grad=False)
    o, s = compiled(q, v)
    assert s is None
    o.sum().backward()
    assert v.grad is None
    o, s = compiled(q, v, output_final_state=True)
    q.grad = None
    s.sum().backward()  # nothing flows into o
    expected = torch.autograd.grad(toys.decayed(q, v)[0][:, -1].sum(), q)[0]
    torch.testing.assert_close(q.grad, expected)


def test_integer_tensors_are_inputs_without_gradient():
    op = toys.make_decayed()
    seen = Counter()
    compiled = torch.compile(lambda q, v, cu: op(q, v, cu_seqlens=cu)[0], fullgraph=True, backend=seen)
    q, v = rand(1, 4, 2), rand(1, 4, 2)
    for end in (4, 9):  # the values are no constants: a second tensor needs no second graph
        cu = torch.tensor([0, end])
        torch.testing.assert_close(compiled(q, v, cu), toys.decayed(q, v, cu_seqlens=cu)[0])
    assert len(seen.graphs) == 1
    compiled(q, v, torch.tensor([0, 4])).sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize(
    ("calls", "graphs"),
    [
        ([{}, *({"scale": s} for s in (0.5, 0.25, 2, 0.5, None, 0.3))], 6),
        ([{"window": w} for w in (2, 3, 4, 5, 3)], 4),
        ([{"mode": "sum"}, {"mode": "none"}, {"dtype": torch.float64}, {"mode": "sum"}], 3),
    ],
    ids=["float", "int", "str and dtype"],
)
def test_statics_are_constants_of_the_graph_and_another_value_compiles_again(calls, graphs):
    op = toys.make_decayed()
    seen = Counter()
    compiled = torch.compile(
        lambda q, v, **k: op(q, v, **k)[0], fullgraph=True, backend=aot_autograd(fw_compiler=seen.boxed)
    )
    q, v = rand(1, 3, 2, grad=False), rand(1, 3, 2, grad=False)
    for k in calls:  # Dynamo turns a number that has changed into a symbol; each must come back as the number given
        torch.testing.assert_close(compiled(q, v, **k), toys.decayed(q, v, **k)[0])
    assert len(seen.graphs) == graphs
    nodes = [n for g in seen.graphs for n in g.graph.nodes if "toy_decayed" in str(n.target)]
    assert len(nodes) == graphs
    assert all(not isinstance(a, torch.fx.Node) for n in nodes for a in n.args[2:])


def test_each_op_is_one_named_node():
    op = toys.make_plain()
    seen = Counter()
    torch.compile(lambda x: op(op(x, 2.0)), fullgraph=True, backend=seen)(rand(3))
    targets = [n.target for n in seen.graphs[0].graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    assert len(targets) == 2
    assert targets[0]._schema.name.startswith("fla::toy_plain")
    assert "Tensor? scale, float? scale_float" in str(targets[0]._schema)


@pytest.mark.parametrize("scale", [2.0, torch.tensor(3.0), torch.tensor(3.0, requires_grad=True)])
def test_argument_that_is_a_number_or_a_tensor(scale):
    op = toys.make_plain()
    x = rand(3)
    compiled = torch.compile(lambda x, s: op(x, s), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, scale), x * scale)
    compiled(x, scale).sum().backward()
    if isinstance(scale, torch.Tensor) and scale.requires_grad:
        torch.testing.assert_close(scale.grad, x.detach().sum())


@pytest.mark.parametrize("backend", [*BACKENDS, "inductor"])
def test_result_that_is_the_input_is_copied(backend):
    op = toys.make_plain()
    x = rand(3, 4).t()
    y = torch.compile(lambda x: op(x), fullgraph=True, backend=backend)(x)
    torch.testing.assert_close(y, x)
    assert y.data_ptr() != x.data_ptr()
    y.sum().backward()


@pytest.mark.parametrize("backend", [*BACKENDS, "inductor"])
def test_marked_length_is_dynamic(backend):
    op = toys.make_stateful()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compiled = torch.compile(lambda q: op(q, None, True), fullgraph=True, backend=backend)
    for t in (5, 8, 13):
        q = rand(2, t, 4)
        torch._dynamo.mark_dynamic(q, 1)
        torch.testing.assert_close(gradients(compiled, (q,)), gradients(lambda q: toys.stateful(q, None, True), (q,)))
    if backend != "inductor":
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= 2


def test_differentiated_call_runs_with_gradients_only_in_the_backward():
    op = toys.make_decayed()
    compiled = torch.compile(lambda q, v: op(q, v)[0], fullgraph=True, backend="aot_eager")
    q, v = rand(1, 3, 2), rand(1, 3, 2)
    o = compiled(q, v)
    assert op.runs == [False]
    o.sum().backward()
    assert op.runs == [False, True]
    with torch.no_grad():
        compiled(q, v)
    assert op.runs == [False, True, False]


@pytest.mark.parametrize("backend", [*BACKENDS, "inductor"])
def test_declared_pair_replaces_the_second_run(backend):
    op = toys.make_cube()
    compiled = torch.compile(lambda x: op(x, 0.5) * 2, fullgraph=True, backend=backend)
    x = rand(6)
    torch.testing.assert_close(gradients(compiled, (x,)), gradients(lambda x: toys.cube(x, 0.5) * 2, (x,)))
    assert op.pair.calls == ["forward", "backward"]
    assert op.runs == []
    with torch.no_grad():
        compiled(x)
    assert op.pair.calls == ["forward", "backward"]
    assert op.runs == [False]


def test_argument_that_no_graph_can_hold_is_named():
    op = toys.make_decayed()
    compiled = torch.compile(lambda q, c: op(q, q, cp_context=c), fullgraph=True, backend="eager")
    compiled(rand(1, 2, 2), None)
    with pytest.raises(Exception, match=r"cp_context is a PosixPath, which torch.compile cannot carry"):
        compiled(rand(1, 2, 2), Path("x"))
    compiled = torch.compile(lambda q: op(q, q, "fast"), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="scale is a str"):
        compiled(rand(1, 2, 2))


def test_op_that_writes_in_place_is_refused():
    op = toys.make_plain()
    op.inplace = True
    with pytest.raises(Exception, match="writes into its arguments"):
        torch.compile(lambda x: op(x), fullgraph=True, backend="eager")(rand(2))


def test_result_of_another_structure_than_declared_is_refused():
    op = toys.make_decayed()
    compiled = torch.compile(lambda q: op(q, q), fullgraph=True, backend="aot_eager")
    q = rand(1, 2, 2, grad=False)
    compiled(q)
    op.run = lambda args: (args[0] * 1, args[0] * 2)
    with pytest.raises(RuntimeError, match=r"returned \(tt\), its outputs were declared as \(tn\)"):
        compiled(q)


@pytest.mark.parametrize("case", ["decayed", "stateful", "plain", "cube"])
def test_registrations_pass_opcheck(case):
    from fla.backends._compile import register

    op = getattr(toys, f"make_{case}")()
    overload = getattr(torch.ops.fla, register(op)).default
    q, v, s = rand(2, 3, 4), rand(2, 3, 4), rand(2, 4)
    args: tuple[Any, ...] = {
        "decayed": (q, v, 0.5, s, True, None, 2, "sum", None),
        "stateful": (q, [s, s.detach()], "(tt)", True),
        "plain": (q, v, None),
        "cube": (q, 0.5),
    }[case]
    torch.library.opcheck(overload, (*args, True))
    torch.library.opcheck(overload, (*(a.detach() if isinstance(a, torch.Tensor) else a for a in args), False))


def test_op_defined_twice_keeps_both_registrations():
    from fla.backends._compile import register

    first, second = toys.make_plain(), toys.make_plain()
    assert register(first) != register(second)
    assert register(first) == register(first)


def test_compiled_region_under_no_grad_and_checkpoint():
    op = toys.make_decayed()
    q, v = rand(1, 3, 2), rand(1, 3, 2)
    compiled = torch.compile(lambda q, v: op(q, v)[0], fullgraph=True, backend="aot_eager")
    again = torch.utils.checkpoint.checkpoint(compiled, q, v, use_reentrant=False)
    again.sum().backward()
    expected = torch.autograd.grad(toys.decayed(q, v)[0].sum(), (q, v))
    torch.testing.assert_close((q.grad, v.grad), expected)


def test_framework_does_not_import_torch_for_the_bridge():
    code = "import sys, fla.backends; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
