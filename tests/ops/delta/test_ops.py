# SPDX-License-Identifier: MIT
"""The public delta ops against the token recurrence in float64: outputs, states and every gradient."""

from __future__ import annotations

import functools

import pytest
import torch

from fla.ops.delta_rule import chunk_delta_rule, fused_recurrent_delta_rule
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from fla.ops.kda import chunk_kda, fused_recurrent_kda

KDA = [chunk_kda, fused_recurrent_kda]
GDN = [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule]
DELTA = [chunk_delta_rule, fused_recurrent_delta_rule]
GATED = [*KDA, *GDN]
OPS = [*GATED, *DELTA]
by_name = lambda op: op.__name__

PACKED = [[0, 15], [0, 0, 5, 5, 70, 133, 134, 134], [0, 64, 128], [0, 1, 2, 3, 4]]


@pytest.fixture
def make(delta):
    """Arguments for an op: with a gate of its kind, or with none."""

    def arguments(op, *sizes, **options):
        if op in DELTA:
            B, T, H, _, K, V = sizes
            return delta.inputs(B, T, H, H, K, V, **{**options, "gate": None})
        return delta.inputs(*sizes, vector=op in KDA, **options)

    return arguments


@pytest.mark.parametrize("T", [0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 150])
@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_any_length(delta, make, op, T) -> None:
    delta.compare(delta.call(op), delta.truth, make(op, 2, T, 2, 4, 12, 9, states=2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_any_dtype(delta, make, op, dtype) -> None:
    x = make(op, 2, 70, 2, 4, 16, 16, dtype=dtype, states=2)
    o, S = delta.call(op)(x)
    assert o.dtype == dtype
    assert S.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    delta.compare(delta.call(op), delta.truth, x)


@pytest.mark.parametrize("gate", ["mild", "strong", "cut", "zero"])
@pytest.mark.parametrize("op", GATED, ids=by_name)
def test_any_gate(delta, make, op, gate) -> None:
    delta.compare(delta.call(op), delta.truth, make(op, 1, 90, 2, 2, 16, 16, gate=gate, states=1))


@pytest.mark.parametrize("offsets", PACKED, ids=str)
@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_packed_sequences_equal_separate_ones(delta, make, op, offsets) -> None:
    x = make(op, 1, offsets[-1], 1, 2, 8, 8, states=len(offsets) - 1)
    run = delta.call(op, cu_seqlens=torch.tensor(offsets))
    delta.compare(run, functools.partial(delta.truth, offsets=offsets), x)
    stateless = {name: t for name, t in x.items() if name != "h0"}
    delta.compare(run, functools.partial(delta.truth, offsets=offsets), stateless)


@pytest.mark.parametrize("op", GATED, ids=by_name)
def test_v_first_states_are_transposed_states(delta, make, op) -> None:
    # Square, so that no shape would give a wrong layout away.
    x = make(op, 2, 40, 2, 4, 8, 8, states=2)
    delta.compare(delta.call(op, state_v_first=True), delta.truth, x)
    o, S = delta.call(op)(x)
    o_v, S_v = delta.call(op, state_v_first=True)(x)
    assert torch.equal(o, o_v)
    assert torch.equal(S, S_v)


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("op", GATED, ids=by_name)
def test_everything_in_kernel(delta, make, op, negative) -> None:
    x = make(op, 2, 70, 2, 4, 16, 8, states=2, gate_in_kernel=True)
    x["k"] = 3 * x["k"]
    x["beta"] = x["beta"] * 6 - 3
    flags = {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": negative,
    }
    delta.compare(delta.call(op, **flags), functools.partial(delta.truth, **flags), x)


@pytest.mark.parametrize("parameters", [("A_log", "dt_bias"), ("A_log",), ("dt_bias",), ()], ids=str)
@pytest.mark.parametrize("op", KDA, ids=by_name)
def test_the_bounded_gate_of_kda(delta, make, op, parameters) -> None:
    x = make(op, 1, 33, 2, 2, 8, 8, gate_in_kernel=True)
    x = {name: t for name, t in x.items() if name not in ("A_log", "dt_bias") or name in parameters}
    flags = {"use_gate_in_kernel": True, "lower_bound": -5.0}
    safe = {"safe_gate": True} if op is chunk_kda else {}
    delta.compare(delta.call(op, **flags, **safe), functools.partial(delta.truth, **flags), x)


@pytest.mark.parametrize("op", GATED, ids=by_name)
def test_a_log_of_any_shape_gets_a_gradient_of_its_shape_and_dtype(delta, make, op) -> None:
    x = make(op, 1, 20, 2, 4, 8, 8, gate_in_kernel=True)
    A_log = x["A_log"].view(1, 1, 4, 1).half().requires_grad_()
    bias = x["dt_bias"].bfloat16().requires_grad_()
    delta.call(op, use_gate_in_kernel=True)({**x, "A_log": A_log, "dt_bias": bias})[0].sum().backward()
    assert (A_log.grad.shape, A_log.grad.dtype) == ((1, 1, 4, 1), torch.float16)
    assert (bias.grad.shape, bias.grad.dtype) == (bias.shape, torch.bfloat16)


@pytest.mark.parametrize("scale", [0.25, 1.0, -2.0])
@pytest.mark.parametrize("op", [chunk_kda, chunk_gated_delta_rule, chunk_delta_rule], ids=by_name)
def test_scale(delta, make, op, scale) -> None:
    delta.compare(delta.call(op, scale=scale), functools.partial(delta.truth, scale=scale), make(op, 1, 20, 1, 1, 8, 8))


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_odd_head_dims(delta, make, op) -> None:
    for K, V in ((1, 1), (1, 7), (13, 1), (60, 100)):
        delta.compare(delta.call(op), delta.truth, make(op, 1, 30, 1, 2, K, V, states=1))


@pytest.mark.parametrize("T", [5, 70])
@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_views_and_expanded_inputs(delta, make, op, T) -> None:
    x = make(op, 2, T, 2, 2, 8, 8, states=2)
    fused = torch.cat([x["q"], x["k"], x["v"]], -1)
    q, k, v = fused.split([8, 8, 8], -1)
    views = {**x, "q": q, "k": k, "v": v, "beta": x["beta"][:1, :1].expand(2, T, 2), "h0": x["h0"].mT.contiguous().mT}
    if "g" in x:
        views["g"] = x["g"].flip(1)[:1].expand_as(x["g"])
    plain = {name: t.contiguous() for name, t in views.items()}
    for got, wanted in zip(delta.call(op)(views), delta.call(op)(plain), strict=True):
        assert torch.equal(got, wanted)

    def both(x):
        return delta.call(op)({**x, "v": x["v"][..., ::2], "q": x["q"].mT.contiguous().mT})

    narrow = {**x, "v": x["v"].repeat_interleave(2, -1)}
    delta.compare(both, lambda x: delta.truth({**x, "v": x["v"][..., ::2]}), narrow)


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_no_initial_state_is_a_state_of_zeros(delta, make, op) -> None:
    x = make(op, 2, 70, 1, 1, 8, 8)
    x = {name: t.requires_grad_() for name, t in x.items()}
    results = []
    for state in ({}, {"h0": torch.zeros(2, 1, 8, 8)}):
        o, S = delta.call(op)({**x, **state})
        results.append([o, S, *torch.autograd.grad(o.square().sum() + S.square().sum(), list(x.values()))])
    for without, zeros in zip(*results, strict=True):
        assert torch.equal(without, zeros)
    if "g" in x:
        assert (results[0][2 + list(x).index("g")][:, 0] == 0).all()


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_two_halves_with_the_state_between_equal_the_whole(delta, make, op) -> None:
    x = make(op, 2, 90, 1, 1, 8, 8, states=2)
    whole, last = delta.call(op)(x)
    cut = lambda a, b: {name: t[:, a:b] for name, t in x.items() if name != "h0"}
    first, state = delta.call(op)({**cut(0, 50), "h0": x["h0"]})
    second, end = delta.call(op)({**cut(50, 90), "h0": state})
    assert delta.error(torch.cat([first, second], 1), whole.double()) < 1e-6
    assert delta.error(end, last.double()) < 1e-6


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_a_row_does_not_depend_on_its_batch(delta, make, op) -> None:
    x = make(op, 3, 70, 1, 1, 8, 8, states=3)
    alone = delta.call(op)({name: t[:1] for name, t in x.items()})
    for one, all_rows in zip(alone, delta.call(op)(x), strict=True):
        assert delta.error(all_rows[:1], one.double()) < 1e-6


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_calls_are_bit_identical_and_leave_arguments_alone(delta, make, op) -> None:
    x = {name: t.requires_grad_() for name, t in make(op, 2, 70, 1, 2, 8, 8, states=2).items()}
    before = {name: t.detach().clone() for name, t in x.items()}
    runs = []
    for _ in range(2):
        o, S = delta.call(op)(x)
        runs.append([o, S, *torch.autograd.grad([o.sum() + S.sum()], list(x.values()))])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert all(torch.equal(t, before[name]) for name, t in x.items())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_offsets_edited_in_place_give_fresh_results(delta, make, op, dtype) -> None:
    x = make(op, 1, 40, 1, 1, 8, 8)
    cu = torch.tensor([0, 10, 40], dtype=dtype)
    run = delta.call(op, cu_seqlens=cu)
    for offsets in ([0, 10, 40], [0, 33, 40], [0, 0, 40]):
        cu.copy_(torch.tensor(offsets))
        wanted = delta.truth({name: t.double() for name, t in x.items()}, offsets=offsets)
        assert max(map(delta.error, run(x), wanted)) < 1e-5


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_state_is_returned_only_when_asked_for(delta, make, op) -> None:
    x = make(op, 1, 5, 1, 1, 4, 4)
    assert op(**x)[1] is None
    assert op(**x, output_final_state=True)[1] is not None


@pytest.mark.parametrize("op", OPS, ids=by_name)
@pytest.mark.parametrize("T", [1, 3, 70])
def test_autocast_does_not_lower_the_precision(delta, make, op, T) -> None:
    x = make(op, 1, T, 1, 1, 8, 8)
    wanted = op(**x)[0], *delta.call(op)(x)
    with torch.autocast("cpu", torch.bfloat16):
        got = op(**x)[0], *delta.call(op)(x)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize(
    "sizes", [(0, 5, 2, 4, 4), (2, 0, 2, 4, 4), (1, 5, 0, 4, 4), (1, 5, 2, 0, 4), (1, 70, 2, 4, 0)]
)
@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_axes_of_no_length(make, op, sizes) -> None:
    B, T, H, K, V = sizes
    x = {name: t.detach().requires_grad_() for name, t in make(op, B, T, H, H, K, V, states=B).items()}
    x["initial_state"] = x.pop("h0")
    o, S = op(**x, output_final_state=True, scale=1.0)
    assert o.shape == (B, T, H, V)
    assert S.shape == (B, H, K, V)
    assert not o.any()
    assert torch.equal(S, x["initial_state"])
    (o.sum() + S.sum()).backward()
    o, _ = op(**{name: t for name, t in x.items() if name != "initial_state"}, scale=1.0)
    o.sum().backward()
    if K == 0:
        with pytest.raises(ValueError, match="`scale` must be given"):
            op(**x)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_inference(delta, make, op, mode) -> None:
    x = make(op, 1, 20, 1, 1, 8, 8, states=2)
    cu = torch.tensor([0, 4, 20])
    wanted = delta.call(op, cu_seqlens=cu)(x)
    with mode():
        got = delta.call(op, cu_seqlens=cu)(x)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
