# SPDX-License-Identifier: MIT
"""Gated slot attention against its token recurrence in float64: outputs, both states and every gradient."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fla.ops import chunk_gsa, fused_recurrent_gsa
from fla.ops.gsa.gate import fused_additive_gate
from fla.ops.gsa.naive import naive_recurrent_gsa

OPS = [chunk_gsa, fused_recurrent_gsa]
every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
TOLERANCE = {
    torch.float64: (1e-10, 1e-10),
    torch.float32: (1e-5, 1e-5),
    torch.float16: (5e-3, 1e-2),
    torch.bfloat16: (5e-3, 1e-2),
}
PACKED = [0, 0, 5, 5, 70, 77, 77]
STATES = ("hk", "hv", "z")


def gate(x: Tensor, z: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The additive gate token by token: weights, log decays, last normaliser ``[B, 1, H, D]``."""
    before = x.new_full((x.shape[0], *x.shape[2:]), -torch.inf) if z is None else z[:, 0]
    weights, decays = [], []
    for t in range(x.shape[1]):
        now = torch.logaddexp(before, x[:, t])
        weights.append((x[:, t] - now).exp())
        decays.append(torch.where(before == -torch.inf, 0.0, before - now))
        before = now
    stack = lambda rows: torch.stack(rows, 1) if rows else torch.zeros_like(x)
    return stack(weights), stack(decays), before.unsqueeze(1)


def recurrence(q, k, v, s, g=None, hk=None, hv=None, z=None, scale=None, offsets=None, reverse=False) -> list[Tensor]:
    """Outputs, hk, hv and z."""
    spans = [(0, q.shape[1])] if offsets is None else list(itertools.pairwise(offsets))
    parts = []
    for n, (a, b) in enumerate(spans):
        cut = [None if x is None else x[:, a:b].flip(1) if reverse else x[:, a:b] for x in (q, k, v, s, g)]
        state = [x if x is None or offsets is None else x[n : n + 1] for x in (hk, hv, z)]
        last = cut[3][:, :0].sum(1, keepdim=True)
        if cut[4] is None:
            cut[3], cut[4], last = gate(cut[3], state[2])
        initial = None if hk is None else (state[0], state[1])
        o, (final_k, final_v) = naive_recurrent_gsa(*cut, scale, initial, True)
        parts.append([o.flip(1) if reverse else o, final_k, final_v, last])
    return [torch.cat(x, 0 if i else 1) for i, x in enumerate(zip(*parts, strict=True))]


@pytest.fixture
def make(truth):
    """Leaf tensors; ``gated=False`` leaves ``g`` out and makes ``s`` log scores."""

    def arguments(
        B: int,
        T: int,
        HQ: int,
        H: int,
        K: int,
        V: int,
        M: int,
        *,
        N: int | None = None,
        dtype=torch.float32,
        gated: bool = True,
        kind: str = "mild",
        states: bool = True,
    ) -> dict[str, Tensor]:
        torch.manual_seed(B + 10 * T + 100 * K + V)
        wide = torch.promote_types(dtype, torch.float32)
        shapes = {"q": (B, T, HQ, K), "k": (B, T, H, K), "v": (B, T, H, V), "s": (B, T, H, M)}
        data = {name: torch.randn(shape, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}
        data["s"] = data["s"].to(wide)
        if gated:
            data["g"] = truth.gates(kind, (B, T, H, M)).to(wide)
            data["s"] = data["s"].sigmoid()
        if states:
            data["hk"], data["hv"] = torch.randn(N or B, H, K, M).to(wide), torch.randn(N or B, H, M, V).to(wide)
            if not gated:
                data["z"] = torch.randn(N or B, 1, H, M).to(wide)
        return {name: x.requires_grad_() for name, x in data.items()}

    return arguments


def call(op, data: dict[str, Tensor], **options: Any) -> list[Tensor]:
    given = {name: x for name, x in data.items() if name not in STATES}
    if "hk" in data:
        options["initial_state"] = tuple(data[name] for name in STATES if name in data)
    o, states = op(**given, **options, output_final_state=True)
    return [o, *states]


@pytest.fixture
def compare(truth):
    def check(op, data, **options: Any) -> None:
        exact = {name: x.detach().double().requires_grad_() for name, x in data.items()}
        wanted = recurrence(**exact, **options)
        offsets = options.pop("offsets", None)
        if offsets is not None:
            options["cu_seqlens"] = torch.tensor(offsets)
        got = call(op, data, **options)
        assert len(got) == (4 if "z" in data else 3)
        wanted = wanted[: len(got)]
        assert [x.shape for x in got] == [x.shape for x in wanted]
        assert got[0].dtype == data["q"].dtype
        assert {x.dtype for x in got[1:]} == {torch.promote_types(data["q"].dtype, torch.float32)}
        forward, backward = TOLERANCE[data["q"].dtype]
        errors = [truth.error(a, b) for a, b in zip(got, wanted, strict=True)]
        assert max(errors) < forward, errors
        seeds = [torch.randn_like(x) for x in wanted]
        for results in (wanted, got):
            loss = sum((x.double() * seed).sum() for x, seed in zip(results, seeds, strict=True))
            if loss.requires_grad:
                loss.backward()
        grad = lambda x: torch.zeros_like(x) if x.grad is None else x.grad
        errors = {f"d{n}": truth.error(grad(x), grad(exact[n])) for n, x in data.items()}
        assert {n: e for n, e in errors.items() if not e < backward} == {}
        assert all(x.grad is None or x.grad.dtype == x.dtype for x in data.values())

    return check


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("T", [0, 1, 2, 15, 64, 65, 130])
@every_op
def test_any_length(make, compare, op, T, gated) -> None:
    compare(op, make(2, T, 2, 2, 6, 9, 5, gated=gated), scale=0.7)
    if gated or T != 1:  # the slots of one token are equal: no gradient for its query, but rounding
        compare(op, make(2, T, 2, 2, 6, 9, 5, gated=gated, states=False))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("T", [1, 70])
@every_op
def test_query_groups(make, compare, op, T, gated) -> None:
    compare(op, make(2, T, 6, 2, 8, 6, 4, gated=gated))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@every_op
def test_any_dtype_and_odd_widths(make, compare, op, dtype) -> None:
    compare(op, make(1, 70, 2, 1, 33, 65, 17, dtype=dtype))


@pytest.mark.parametrize("kind", ["strong", "cut", "zero"])
@every_op
def test_any_gate(make, compare, op, kind) -> None:
    # N03: gradients under decays that underflow.
    compare(op, make(2, 100, 2, 2, 16, 8, 8, kind=kind))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("gated", [True, False])
@every_op
def test_packed_sequences_equal_separate_ones(make, compare, op, gated, reverse) -> None:
    if reverse and op is chunk_gsa:
        pytest.skip("the chunk form has no reverse")
    options = {"reverse": True} if reverse else {}
    compare(op, make(1, 77, 2, 1, 8, 6, 4, N=6, gated=gated), offsets=PACKED, **options)
    compare(op, make(1, 77, 2, 1, 8, 6, 4, N=6, gated=gated, states=False), offsets=PACKED, **options)


@pytest.mark.parametrize("gated", [True, False])
def test_reverse(make, compare, gated) -> None:
    compare(fused_recurrent_gsa, make(2, 77, 2, 2, 8, 6, 4, gated=gated), reverse=True)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("cut", [1, 50, 64])
@every_op
def test_a_run_resumes_from_its_states(truth, make, op, cut, gated) -> None:
    # Without a gate 0.6.0 carries no normaliser; here the third state does.
    data = {name: x.detach() for name, x in make(2, 90, 4, 2, 6, 6, 4, gated=gated, states=False).items()}
    empty = (None, None) if gated else (None, None, None)
    o, whole = op(**data, initial_state=empty, output_final_state=True)
    first, state = op(**{n: x[:, :cut] for n, x in data.items()}, initial_state=empty, output_final_state=True)
    second, end = op(**{n: x[:, cut:] for n, x in data.items()}, initial_state=state, output_final_state=True)
    assert truth.error(torch.cat([first, second], 1), o) < 1e-6
    assert max(truth.error(a, b) for a, b in zip(end, whole, strict=True)) < 1e-6
    assert torch.equal(op(**data)[0], o)


def test_decoding_token_by_token_equals_the_whole(truth, make) -> None:
    data = {name: x.detach() for name, x in make(1, 20, 4, 2, 6, 6, 4, gated=False, states=False).items()}
    whole, _ = chunk_gsa(**data)
    state, rows = [None, None, None], []
    for t in range(20):
        one = {name: x[:, t : t + 1] for name, x in data.items()}
        o, state = fused_recurrent_gsa(**one, initial_state=state, output_final_state=True)
        rows.append(o)
    assert truth.error(torch.cat(rows, 1), whole) < 1e-6


@pytest.mark.parametrize("T", [1, 70])
def test_g07_both_forms_nest_their_states_alike(make, T) -> None:
    data = {name: x.detach() for name, x in make(2, T, 2, 2, 6, 6, 4, states=False).items()}
    for op in OPS:
        for state in (None, (None, None), [None, None]):
            assert op(**data, initial_state=state)[1] == [None, None]
            _, final = op(**data, initial_state=state, output_final_state=True)
            assert [list(x.shape) for x in final] == [[2, 2, 6, 4], [2, 2, 4, 6]]
    ungated = {name: x for name, x in data.items() if name != "g"}
    for op in OPS:
        assert op(**ungated)[1] == [None, None]
        assert op(**ungated, initial_state=(None, None, None))[1] == [None, None, None]
        assert len(op(**ungated, output_final_state=True)[1]) == 2


def test_flags_of_the_chunk_form_change_nothing(make) -> None:
    data = {name: x.detach() for name, x in make(1, 70, 2, 2, 6, 6, 4, states=False).items()}
    o = chunk_gsa(**data)[0]
    for options in ({"checkpoint_level": 0}, {"checkpoint_level": 1}, {"chunk_size": 16}, {"chunk_size": 128}):
        assert torch.equal(chunk_gsa(**data, **options)[0], o)


def test_the_reference_without_gate_is_the_gated_one(make) -> None:
    data = {name: x.detach().double() for name, x in make(1, 30, 2, 2, 6, 6, 4, gated=False, states=False).items()}
    torch.testing.assert_close(naive_recurrent_gsa(**data)[0], recurrence(**data)[0])
    assert naive_recurrent_gsa(**data)[1] is None


# The additive gate


def gate_inputs(B: int, T: int, N: int, dtype=torch.float32, never: float = 0.0) -> dict[str, Tensor]:
    torch.manual_seed(B + T)
    x = 5 * torch.randn(B, T, 2, 3, dtype=torch.float64)
    z = torch.randn(N, 1, 2, 3, dtype=torch.float64)
    if never:
        x, z = (torch.where(torch.rand(t.shape) < never, -torch.inf, t) for t in (x, z))
    return {"x": x.to(dtype).requires_grad_(), "initial_state": z.to(dtype).requires_grad_()}


@pytest.mark.parametrize("offsets", [None, PACKED], ids=str)
@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_additive_gate_and_its_gradients(truth, dtype, state, offsets) -> None:
    data = gate_inputs(1 if offsets else 2, 77, 6 if offsets else 2, dtype)
    if not state:
        del data["initial_state"]
    exact = {name: x.detach().double().requires_grad_() for name, x in data.items()}
    spans = [(0, 77)] if offsets is None else list(itertools.pairwise(offsets))
    z = exact.get("initial_state")
    parts = [
        gate(exact["x"][:, a:b], z if z is None or not offsets else z[n : n + 1]) for n, (a, b) in enumerate(spans)
    ]
    wanted = [torch.cat(x, 0 if i == 2 else 1) for i, x in enumerate(zip(*parts, strict=True))]
    got = fused_additive_gate(**data, cu_seqlens=None if offsets is None else torch.tensor(offsets))
    seeds = [torch.randn_like(x) for x in wanted]
    for results in (got, wanted):
        finite = lambda x: x.masked_fill(x == -torch.inf, 0.0)
        sum((finite(x).double() * seed).sum() for x, seed in zip(results, seeds, strict=True)).backward()
    tolerance = TOLERANCE[dtype][0]
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a == -torch.inf, b == -torch.inf)
        assert truth.error(finite(a), finite(b)) < tolerance
    for name, x in data.items():
        assert truth.error(x.grad, exact[name].grad) < tolerance, name


def test_scores_of_minus_infinity_have_no_weight_and_finite_gradients(truth) -> None:
    data = gate_inputs(2, 30, 2, torch.float64, never=0.5)
    k, g, z = fused_additive_gate(**data)
    with torch.no_grad():
        never = (data["x"] == -torch.inf) & (data["initial_state"] == -torch.inf)
        assert (k[data["x"] == -torch.inf] == 0).all()
        assert (g[:, 0][never[:, 0]] == 0).all()
    (k.sin().sum() + g.sin().sum() + z.masked_fill(z == -torch.inf, 0.0).sum()).backward()
    assert all(x.grad.isfinite().all() for x in data.values())
    assert (data["x"].grad[data["x"] == -torch.inf] == 0).all()
    nothing = fused_additive_gate(torch.full((1, 3, 1, 2), -torch.inf))
    assert (nothing[0] == 0).all()
    assert (nothing[1] == 0).all()
    assert (nothing[2] == -torch.inf).all()


def test_dtypes_and_errors_of_the_additive_gate() -> None:
    x = torch.randn(2, 5, 1, 3).bfloat16()
    k, g, z = fused_additive_gate(x)
    assert (k.dtype, g.dtype, z.dtype, z.shape) == (torch.bfloat16, torch.bfloat16, torch.float32, (2, 1, 1, 3))
    k, g, _ = fused_additive_gate(x, output_dtype=torch.float32, gate_dtype=torch.float64)
    assert (k.dtype, g.dtype) == (torch.float32, torch.float64)
    for bad in (torch.zeros(2, 1, 3), torch.zeros(2, 2, 1, 3), torch.zeros(3, 1, 1, 3)):
        with pytest.raises(ValueError, match="initial"):
            fused_additive_gate(x, bad)
    with pytest.raises(ValueError, match="`x` must have shape"):
        fused_additive_gate(x[0])
    with pytest.raises(TypeError, match="`x` must be float16"):
        fused_additive_gate(x.long())
    with pytest.raises(ValueError, match="batch size is expected to be 1"):
        fused_additive_gate(x, cu_seqlens=torch.tensor([0, 5]))


# Bad input


@every_op
def test_bad_input_names_the_argument(make, op) -> None:
    good = {name: x.detach() for name, x in make(2, 8, 4, 2, 4, 6, 3, states=False).items()}
    op(**good)
    hk, hv, z = torch.zeros(2, 2, 4, 3), torch.zeros(2, 2, 3, 6), torch.zeros(2, 1, 2, 3)
    ungated = {"g": None}
    changes: list[tuple[dict[str, Any], str, type[Exception]]] = [
        ({"q": good["q"][0]}, "`q` must have shape", ValueError),
        ({"q": good["q"][:, :, :3]}, "multiple of that of key heads, got HQ = 3, H = 2", ValueError),
        ({"q": good["q"][:, :, :1]}, "multiple of that of key heads", ValueError),
        ({"k": torch.randn(2, 8, 2, 5)}, "`k` must have shape", ValueError),
        ({"v": good["v"][:, :7]}, "`v` must have shape", ValueError),
        ({"s": good["s"][..., :2]}, "`g` must have shape", ValueError),
        ({"s": good["s"][:, :, :1]}, "`s` must have shape", AssertionError),
        ({"g": good["g"][..., 0]}, "`g` must have shape", ValueError),
        ({"v": good["v"].half()}, "must share one floating dtype", TypeError),
        ({"s": good["s"].long()}, "`s` must be float16", TypeError),
        ({"s": None}, "`s` must be a tensor, got NoneType", TypeError),
        ({"s": good["s"].to("meta")}, "device", ValueError),
        ({"initial_state": hk}, "`initial_state` must be the states .hk, hv.", ValueError),
        ({"initial_state": (hk,)}, "`initial_state` must be the states .* got 1 of them", ValueError),
        ({"initial_state": (hk, hv, z)}, "third state `z`, which only goes with g=None", ValueError),
        ({"initial_state": (hv, hk)}, "`initial_state.0.` must have shape", ValueError),
        ({"initial_state": (hk, hv[:1])}, "number of initial states .*`initial_state.1.`", ValueError),
        ({"initial_state": (hk, hv.long())}, "`initial_state.1.` must be float16", TypeError),
        ({"initial_state": (hk, hv, z[:, 0]), **ungated}, "`initial_state.2.` must have shape", ValueError),
        ({"cu_seqlens": torch.tensor([0, 8])}, "batch size is expected to be 1", ValueError),
        ({"scale": "1"}, "scale", TypeError),
        ({"nonsense": 1}, "nonsense", TypeError),
    ]
    if op is chunk_gsa:
        changes += [
            ({"chunk_size": 24}, "`chunk_size` must be", ValueError),
            ({"checkpoint_level": 3}, "`checkpoint_level` must be", AssertionError),
            ({"head_first": True}, "head_first", DeprecationWarning),
        ]
    for change, match, error in changes:
        with pytest.raises(error, match=match):
            op(**{**good, **change})


@pytest.mark.parametrize("gated", [True, False])
@every_op
def test_compiled_calls_equal_eager_ones(make, op, gated, monkeypatch) -> None:
    torch._dynamo.reset()
    data = make(1, 20, 2, 1, 4, 4, 3, N=2, gated=gated)
    eager = lambda **data: call(op, data, cu_seqlens=torch.tensor([0, 7, 20]))
    results = []
    for fn in (eager, torch.compile(eager, fullgraph=True, backend="aot_eager")):
        out = fn(**data)
        results.append([*out, *torch.autograd.grad(sum(x.sin().sum() for x in out), list(data.values()))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
