# SPDX-License-Identifier: MIT
"""RWKV-6, the row that reads before its update: against the token recurrence in float64, with every gradient."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fla.ops import chunk_rwkv6, fused_recurrent_rwkv6
from fla.ops.gla import chunk_gla
from fla.ops.rwkv6.chunk import chunk_rwkv6_fwd_cumsum
from fla.ops.rwkv6.chunk_naive import naive_chunk_rwkv6
from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6, naive_recurrent_rwkv6_bwd

OPS = [chunk_rwkv6, fused_recurrent_rwkv6]
every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
TOLERANCE = {
    torch.float64: (1e-10, 1e-10),
    torch.float32: (1e-5, 1e-5),
    torch.float16: (5e-3, 1e-2),
    torch.bfloat16: (5e-3, 1e-2),
}


def recurrence(r, k, v, w, u, h0=None, scale=None, offsets=None, reverse=False) -> tuple[Tensor, Tensor]:
    """Outputs and states of time-first inputs, from the head-first reference."""
    spans = [(0, r.shape[1])] if offsets is None else list(itertools.pairwise(offsets))
    outputs, states = [], []
    for n, (a, b) in enumerate(spans):
        turn = lambda x, a=a, b=b: (x[:, a:b].flip(1) if reverse else x[:, a:b]).transpose(1, 2)
        state = h0 if offsets is None or h0 is None else h0[n : n + 1]
        o, S = naive_recurrent_rwkv6(*map(turn, (r, k, v, w)), u, scale, state, True)
        o = o.transpose(1, 2)
        outputs.append(o.flip(1) if reverse else o)
        states.append(S)
    return torch.cat(outputs, 1), torch.cat(states)


@pytest.fixture
def make(truth):
    """Leaf tensors r, k, v, w, u and h0."""

    def arguments(*sizes: int, **options: Any) -> dict[str, Tensor]:
        data = truth.inputs(*sizes, "gk", **options)
        data["r"], data["w"] = data.pop("q"), data.pop("gk")
        H, K = sizes[2:4]
        data["u"] = torch.randn(H, K).to(data["w"].dtype).requires_grad_()
        return data

    return arguments


@pytest.fixture
def compare(truth):
    def check(op, data, **options: Any) -> None:
        exact = {name: x.detach().double().requires_grad_() for name, x in data.items()}
        wanted = recurrence(**exact, **options)
        offsets = options.pop("offsets", None)
        if offsets is not None:
            options["cu_seqlens"] = torch.tensor(offsets)
        given = {("initial_state" if name == "h0" else name): x for name, x in data.items()}
        got = op(**given, **options, output_final_state=True)
        assert [x.shape for x in got] == [x.shape for x in wanted]
        assert got[0].dtype == data["v"].dtype
        assert got[1].dtype == torch.promote_types(data["v"].dtype, torch.float32)
        forward, backward = TOLERANCE[data["v"].dtype]
        errors = {name: truth.error(a, b) for name, a, b in zip(("o", "state"), got, wanted, strict=True)}
        assert {n: e for n, e in errors.items() if not e < forward} == {}
        seeds = [torch.randn_like(x) for x in wanted]
        for results in (wanted, got):
            sum((x.double() * seed).sum() for x, seed in zip(results, seeds, strict=True)).backward()
        grad = lambda x: torch.zeros_like(x) if x.grad is None else x.grad
        errors = {f"d{n}": truth.error(grad(x), grad(exact[n])) for n, x in data.items()}
        assert {n: e for n, e in errors.items() if not e < backward} == {}
        assert all(x.grad is None or x.grad.dtype == x.dtype for x in data.values())

    return check


@pytest.mark.parametrize("T", [0, 1, 2, 3, 15, 17, 64, 65, 130])
@every_op
def test_any_length(make, compare, op, T) -> None:
    compare(op, make(2, T, 2, 6, 9), scale=0.7)
    if T:  # without tokens and a state there is nothing to differentiate
        stateless = make(2, T, 2, 6, 9)
        del stateless["h0"]
        compare(op, stateless)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@every_op
def test_any_dtype_and_odd_widths(make, compare, op, dtype) -> None:
    compare(op, make(1, 70, 2, 33, 65, dtype=dtype))


@pytest.mark.parametrize("gate", ["strong", "cut", "zero"])
@every_op
def test_any_gate(make, compare, op, gate) -> None:
    compare(op, make(2, 100, 2, 16, 8, gate=gate))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("offsets", [[0, 0, 5, 5, 70, 77, 77], [0, 1, 2, 3], [0, 64]], ids=str)
@every_op
def test_packed_sequences_equal_separate_ones(make, compare, op, offsets, reverse) -> None:
    if reverse and op is chunk_rwkv6:
        pytest.skip("the chunk form has no reverse")
    options = {"reverse": True} if reverse else {}
    data = make(1, offsets[-1], 2, 8, 6, N=len(offsets) - 1)
    compare(op, data, offsets=offsets, **options)
    stateless = {n: x.detach().requires_grad_() for n, x in data.items() if n != "h0"}
    compare(op, stateless, offsets=offsets, **options)


@pytest.mark.parametrize("T", [1, 2, 77])
def test_reverse_and_the_gradient_of_its_gate(make, compare, T) -> None:
    # 0.6.0 computes dw of the reversed run with the shift of the forward one, and drops the final state's gradient.
    compare(fused_recurrent_rwkv6, make(2, T, 2, 8, 6), reverse=True)


def test_n03_gradients_under_decays_of_minus_10_to_minus_60(make, compare) -> None:
    data = make(2, 128, 2, 32, 32)
    with torch.no_grad():
        data["w"].copy_(-10 - 50 * torch.rand(2, 128, 2, 32))
    for op in OPS:
        compare(op, {name: x.detach().requires_grad_() for name, x in data.items()})


@every_op
def test_a_run_resumes_from_its_state(truth, make, op) -> None:
    data = {name: x.detach() for name, x in make(2, 90, 2, 6, 6).items()}
    h0, u = data.pop("h0"), data.pop("u")
    o, S = op(**data, u=u, initial_state=h0, output_final_state=True)
    cut = lambda a, b: {name: x[:, a:b] for name, x in data.items()}
    first, state = op(**cut(0, 50), u=u, initial_state=h0, output_final_state=True)
    second, end = op(**cut(50, 90), u=u, initial_state=state, output_final_state=True)
    assert truth.error(torch.cat([first, second], 1), o) < 1e-6
    assert truth.error(end, S) < 1e-6
    assert op(**data, u=u)[1] is None


def test_a_bonus_of_one_and_no_decay_is_linear_attention(make) -> None:
    data = {name: x.detach() for name, x in make(1, 70, 2, 8, 6, gate="zero").items()}
    wanted = chunk_gla(data["r"], data["k"], data["v"], data["w"], initial_state=data["h0"])[0]
    r, k, v, w = (data[name] for name in "rkvw")
    o, _ = chunk_rwkv6(r, k, v, w, torch.ones(2, 8), initial_state=data["h0"])
    torch.testing.assert_close(o, wanted, rtol=1e-4, atol=1e-5)
    for size in (16, 32, 64, 128, None):
        assert torch.equal(chunk_rwkv6(r, k, v, w, torch.ones(2, 8), initial_state=data["h0"], chunk_size=size)[0], o)


def test_what_is_not_finite_stays_in_its_sequence(make) -> None:
    data = {name: x.detach().requires_grad_() for name, x in make(1, 40, 1, 4, 4, N=2).items()}
    bad = {name: x.detach().clone().requires_grad_() for name, x in data.items()}
    with torch.no_grad():
        bad["r"][0, 25] = torch.nan
        bad["r"][0, 20] = torch.inf
    cu = torch.tensor([0, 20, 40])
    grads = []
    for x in (data, bad):
        x = {("initial_state" if n == "h0" else n): t for n, t in x.items()}
        o, _ = chunk_rwkv6(**x, cu_seqlens=cu)
        grads.append([o[:, :20], *(g[:, :20] for g in torch.autograd.grad(o.sum(), [x[n] for n in "rkvw"]))])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_references_agree(make) -> None:
    data = {name: x.detach().double() for name, x in make(2, 64, 2, 6, 5, gate="strong").items()}
    turned = [data[name].transpose(1, 2) for name in "rkvw"]
    o = naive_recurrent_rwkv6(*turned, data["u"], scale=1.0)[0]
    torch.testing.assert_close(naive_chunk_rwkv6(*turned, data["u"]), o)
    with pytest.raises(ValueError, match="multiple of chunk_size"):
        naive_chunk_rwkv6(*(x[:, :, :63] for x in turned), data["u"])
    do = torch.randn_like(o)
    grads = naive_recurrent_rwkv6_bwd(*turned, data["u"], o, do, data["h0"])
    leaves = {n: x.clone().requires_grad_() for n, x in data.items()}
    wanted = chunk_rwkv6(*(leaves[n] for n in "rkvwu"), scale=1.0, initial_state=leaves["h0"])[0]
    (wanted * do.transpose(1, 2)).sum().backward()
    for name, grad in zip(("r", "k", "v", "w", "u", "h0"), grads, strict=True):
        torch.testing.assert_close(grad.transpose(1, 2) if name in "rkvw" else grad, leaves[name].grad)
    assert (grads[3][:, :, -1] == 0).all()
    assert naive_recurrent_rwkv6_bwd(*turned, data["u"], o, do)[-1] is None


def test_sums_within_chunks_with_and_without_the_token() -> None:
    g = -torch.rand(1, 40, 2, 3)
    g[0, 5] = -torch.inf
    inclusive, exclusive = chunk_rwkv6_fwd_cumsum(g, 16, scale=2.0, cu_seqlens=torch.tensor([0, 7, 40]))
    for a, b in ((0, 7), (7, 23), (23, 39), (39, 40)):
        torch.testing.assert_close(inclusive[:, a:b], 2 * g[:, a:b].cumsum(1))
        torch.testing.assert_close(exclusive[:, a + 1 : b], inclusive[:, a : b - 1])
        assert (exclusive[:, a] == 0).all()
    with pytest.raises(ValueError, match="chunk_size"):
        chunk_rwkv6_fwd_cumsum(g, 24)


@every_op
def test_bad_input_names_the_argument(make, op) -> None:
    good = {name: x.detach() for name, x in make(2, 8, 2, 4, 6).items() if name != "h0"}
    op(**good)
    changes: list[tuple[dict[str, Any], str, type[Exception]]] = [
        ({"r": good["r"][0]}, "`r` must have shape", ValueError),
        ({"k": good["k"][:, :, :1]}, "`k` must have shape .* from `r`", ValueError),
        ({"v": good["v"][:, :7]}, "`v` must have shape", ValueError),
        ({"w": good["w"][..., 0]}, "`w` must have shape", ValueError),
        ({"u": good["u"][:1]}, "`u` must have shape", AssertionError),
        ({"u": good["u"].unsqueeze(0)}, "`u` must have shape", ValueError),
        ({"r": good["r"].half()}, "`r`, `k`, `v` must share one floating dtype", TypeError),
        ({"u": good["u"].long()}, "`u` must be float16", TypeError),
        ({"w": None}, "`w` must be a tensor, got NoneType", TypeError),
        ({"r": None}, "`r` must be a tensor, got NoneType", TypeError),
        ({"u": good["u"].to("meta")}, "device", ValueError),
        ({"initial_state": torch.zeros(2, 2, 6, 4)}, "`initial_state` must have shape", ValueError),
        ({"cu_seqlens": torch.tensor([0, 8])}, "batch size is expected to be 1", ValueError),
        ({"scale": "1"}, "scale", TypeError),
        ({"state_v_first": True}, "state_v_first", TypeError),
    ]
    if op is chunk_rwkv6:
        changes.append(({"chunk_size": 24}, "`chunk_size` must be", ValueError))
        changes.append(({"head_first": True}, "head_first", DeprecationWarning))
    for change, match, error in changes:
        with pytest.raises(error, match=match):
            op(**{**good, **change})
