# SPDX-License-Identifier: MIT
"""HGRN against its token recurrence in float64: outputs, states and every gradient."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fla.ops
from fla.ops._common.checks import ArgumentError, DtypeError
from fla.ops._scan import torch_scan
from fla.ops.hgrn import chunk_hgrn, fused_recurrent_hgrn
from fla.ops.hgrn.naive import naive_chunk_hgrn, naive_recurrent_hgrn

OPS = [chunk_hgrn, fused_recurrent_hgrn]
every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
# RMS error over RMS of the truth, by dtype: (outputs and states, gradients).
TOLERANCE = {
    torch.float64: (1e-10, 1e-10),
    torch.float32: (1e-5, 1e-5),
    torch.float16: (5e-3, 1e-2),
    torch.bfloat16: (5e-3, 1e-2),
}


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Deterministic mode fills what torch.empty returns with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["chunks", "tokens"])
def path(request, monkeypatch) -> None:
    """Both ways of the scan: narrow inputs in chunks, wide ones token by token."""
    monkeypatch.setattr(torch_scan, "WIDE", 1 << 40 if request.param == "chunks" else 0)


def inputs(B: int, T: int, D: int, N: int | None = None, gate: str = "mild", dtype=torch.float32) -> dict[str, Tensor]:
    """``gate``: mild, strong (-20 on a third of the steps), cut (also -1000 and minus infinity), zero."""
    random = torch.Generator().manual_seed(B + 10 * T + 100 * D)
    normal = lambda *shape: torch.randn(*shape, generator=random, dtype=torch.float64)
    g = F.logsigmoid(normal(B, T, D))
    draw = torch.rand(g.shape, generator=random)
    if gate in ("strong", "cut"):
        g = torch.where(draw < 0.3, -20.0, g)
    if gate == "cut":
        g = torch.where(draw < 0.1, -torch.inf, torch.where(draw < 0.2, -1000.0, g))
    if gate == "zero":
        g = torch.zeros_like(g)
    wide = torch.promote_types(dtype, torch.float32)
    return {"x": normal(B, T, D).to(dtype), "g": g.to(wide), "initial_state": normal(N or B, D).to(wide)}


def truth(x: Tensor, g: Tensor, initial_state: Tensor | None = None, offsets: list[int] | None = None):
    offsets = offsets or []
    if not offsets:
        return naive_recurrent_hgrn(x, g, initial_state, True)
    parts = []
    for n, (a, b) in enumerate(itertools.pairwise(offsets)):
        state = None if initial_state is None else initial_state[n : n + 1]
        parts.append(naive_recurrent_hgrn(x[:, a:b], g[:, a:b], state, True))
    return torch.cat([o for o, _ in parts], 1), torch.cat([h for _, h in parts])


def error(got: Tensor, wanted: Tensor) -> float:
    if not got.isfinite().all():
        return float("inf")
    if not got.numel():
        return 0.0
    difference = (got.detach().double() - wanted.detach()).square().mean().sqrt()
    return float(difference / (wanted.detach().square().mean().sqrt() + 1e-8))


def compare(op: Callable[..., Any], data: dict[str, Tensor], offsets: list[int] | None = None) -> None:
    """Outputs, states and all gradients of ``op(**data)`` are those of the recurrence."""
    given = {name: t.detach().clone().requires_grad_() for name, t in data.items()}
    exact = {name: t.detach().double().requires_grad_() for name, t in data.items()}
    options = {} if offsets is None else {"cu_seqlens": torch.tensor(offsets)}
    got = op(**given, output_final_state=True, **options)
    wanted = truth(**exact, offsets=offsets)
    assert [t.shape for t in got] == [t.shape for t in wanted]
    assert got[0].dtype == data["x"].dtype
    assert got[1].dtype == torch.promote_types(data["x"].dtype, torch.float32)
    forward, backward = TOLERANCE[data["x"].dtype]
    errors = {"o": error(got[0], wanted[0]), "state": error(got[1], wanted[1])}
    assert {n: e for n, e in errors.items() if not e < forward} == {}
    random = torch.Generator().manual_seed(1)
    seeds = [torch.randn(t.shape, generator=random) for t in wanted]
    for results in (got, wanted):
        loss = sum((t * s.to(t.dtype)).sum() for t, s in zip(results, seeds, strict=True))
        loss.backward()
    zero = lambda t: torch.zeros_like(t) if t.grad is None else t.grad
    errors = {f"d{n}": error(zero(t), zero(exact[n])) for n, t in given.items()}
    assert {n: e for n, e in errors.items() if not e < backward} == {}
    assert all(t.grad is None or t.grad.dtype == t.dtype for t in given.values())


@pytest.mark.parametrize("T", [0, 1, 2, 3, 15, 63, 64, 65, 127, 200])
@every_op
def test_any_length(path, op, T) -> None:
    data = inputs(2, T, 5)
    compare(op, data)
    compare(op, {name: data[name] for name in ("x", "g")})


@pytest.mark.parametrize("gate", ["strong", "cut", "zero"])
@every_op
def test_any_gate(path, op, gate) -> None:
    compare(op, inputs(2, 150, 7, gate=gate))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@every_op
def test_any_dtype(path, op, dtype) -> None:
    compare(op, inputs(2, 150, 33, dtype=dtype))


@pytest.mark.parametrize("offsets", [[0, 15], [0, 0, 5, 5, 70, 133, 134, 134], [0, 64, 128], [0, 1, 2, 3]], ids=str)
@every_op
def test_packed_sequences_equal_separate_ones(op, offsets) -> None:
    data = inputs(1, offsets[-1], 6, N=len(offsets) - 1, gate="cut")
    compare(op, data, offsets)
    compare(op, {name: data[name] for name in ("x", "g")}, offsets)


@pytest.mark.parametrize("D", [1, 500, 2048])
def test_any_width(D) -> None:
    compare(chunk_hgrn, inputs(1, 130, D))
    compare(chunk_hgrn, inputs(0, 130, D))


def test_gradients_of_the_chunk_form_reach_both_states() -> None:
    # 0.6.0 drops the gradient of the final state and that for the initial state.
    data = {name: t.requires_grad_() for name, t in inputs(1, 100, 4, gate="zero").items()}
    _, final = chunk_hgrn(**data, output_final_state=True)
    final.sum().backward()
    assert torch.equal(data["initial_state"].grad, torch.ones(1, 4))
    assert torch.equal(data["x"].grad, torch.ones(1, 100, 4))


def test_growing_gates_equal_the_recurrence(path) -> None:
    data = inputs(1, 100, 4)
    compare(chunk_hgrn, {**data, "g": 0.1 * data["x"].cos()})


def test_a_graph_that_is_kept_gives_the_same_gradients_again(path) -> None:
    data = {name: t.requires_grad_() for name, t in inputs(1, 100, 4).items()}
    loss = chunk_hgrn(**data)[0].square().sum()
    first, second = (torch.autograd.grad(loss, list(data.values()), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_sequence_that_overflows_leaves_others_alone() -> None:
    data = inputs(1, 40, 3, N=2)
    alone = chunk_hgrn(data["x"][:, 20:], data["g"][:, 20:], data["initial_state"][1:])[0]
    data["x"][0, 3] = torch.inf
    data["x"][0, 7] = torch.nan
    o, S = chunk_hgrn(**data, cu_seqlens=torch.tensor([0, 20, 40]), output_final_state=True)
    assert torch.equal(o[:, 20:], alone)
    assert S[1].isfinite().all()


@every_op
def test_a_run_resumes_from_its_state(path, op) -> None:
    data = inputs(2, 150, 5)
    h0 = data.pop("initial_state")
    whole, end = op(**data, initial_state=h0, output_final_state=True)
    first, h = op(*(t[:, :50] for t in data.values()), h0, True)
    second, last = op(*(t[:, 50:] for t in data.values()), h, True)
    assert error(torch.cat([first, second], 1), whole.double()) < 1e-6
    assert error(last, end.double()) < 1e-6
    assert op(**data)[1] is None


@every_op
def test_views_half_states_and_repeated_calls(path, op) -> None:
    data = inputs(2, 80, 6)
    x, g = torch.cat([data["x"], data["g"]], -1).split(6, -1)
    o, S = op(x, g, data["initial_state"].half(), True)
    again = op(x.contiguous(), g.contiguous(), data["initial_state"].half().float(), True)
    assert torch.equal(o, again[0])
    assert torch.equal(S, again[1])
    wanted = op(x, g.mT.contiguous().mT)[0]
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        assert torch.equal(op(x, g)[0], wanted)


@pytest.mark.parametrize("T", [0, 1, 64, 100])
def test_references_agree(T) -> None:
    data = {name: t.double() for name, t in inputs(2, T, 4, gate="strong").items()}
    for got, wanted in zip(naive_chunk_hgrn(**data, output_final_state=True), truth(**data), strict=True):
        torch.testing.assert_close(got, wanted)
    assert naive_chunk_hgrn(data["x"], data["g"])[1] is None


@every_op
def test_bad_input_names_the_argument(op) -> None:
    data = inputs(2, 6, 4)

    def refuse(match: str, error: type[Exception] = ArgumentError, batch: int = 2, **changes: Any) -> None:
        with pytest.raises(error, match=match):
            op(**{**{name: t[:batch] for name, t in data.items()}, **changes})

    refuse("`x` must have shape", x=data["x"][0])
    refuse("`g` must have shape .* from `x`", g=data["g"][:, :5])
    refuse("`g` must have shape", g=data["g"].unsqueeze(2))
    refuse("`x` must be float16", DtypeError, x=data["x"].long())
    refuse("`g` must be float16", TypeError, g=data["g"].long())
    refuse("`g` must be a tensor, got NoneType", DtypeError, g=None)
    refuse("device", g=data["g"].to("meta"))
    refuse("`initial_state` must have shape .N, D.", initial_state=torch.zeros(2, 5))
    refuse("number of initial states is expected to be equal", ValueError, initial_state=torch.zeros(3, 4))
    refuse("`initial_state` must be float16", DtypeError, initial_state=torch.zeros(2, 4).long())
    refuse("batch size is expected to be 1 rather than 2", ValueError, cu_seqlens=torch.tensor([0, 6]))
    refuse("`cu_seqlens` must end at the number of tokens", batch=1, cu_seqlens=torch.tensor([0, 5]))
    refuse("number of initial states", batch=1, cu_seqlens=torch.tensor([0, 2, 6]))
    refuse("unknown_option", TypeError, unknown_option=1)


@pytest.mark.parametrize("packed", [False, True])
@every_op
def test_compiled_calls_equal_eager_ones(op, packed) -> None:
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
    data = {name: t.requires_grad_() for name, t in inputs(1, 40, 4, N=2 if packed else 1).items()}
    options = {"cu_seqlens": torch.tensor([0, 7, 40])} if packed else {}
    compiled = torch.compile(
        lambda **kw: op(**kw, **options, output_final_state=True), fullgraph=True, backend="aot_eager"
    )
    results = []
    for fn in (compiled, lambda **kw: op(**kw, **options, output_final_state=True)):
        o, S = fn(**data)
        results.append([o, S, *torch.autograd.grad(o.sin().sum() + S.cos().sum(), list(data.values()))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_names() -> None:
    assert fla.ops.fused_recurrent_hgrn is fused_recurrent_hgrn
