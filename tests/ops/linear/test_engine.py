# SPDX-License-Identifier: MIT
"""The PyTorch engine of the linear family against the token recurrence in float64."""

from __future__ import annotations

import pytest
import torch

from fla.ops._linear.torch_chunk import linear_attention

COMBINATIONS = [("g",), ("gk",), ("gv",), ("gk", "gv"), ("g", "gk"), ("g", "gv"), ("g", "gk", "gv")]
PACKED = [0, 5, 5, 70, 133, 134]


def call(**options):
    def run(h0=None, **data):
        if options.get("state_v_first") and h0 is not None:
            h0 = h0.mT
        o, S = linear_attention(**data, initial_state=h0, output_final_state=True, **options)
        return o, S.mT if options.get("state_v_first") else S

    return run


@pytest.mark.parametrize("gate", ["mild", "strong", "cut", "zero"])
@pytest.mark.parametrize("names", COMBINATIONS, ids="+".join)
def test_every_gate_equals_the_recurrence(truth, names, gate) -> None:
    truth.compare(call(), truth.inputs(1, 81, 2, 9, 12, *names, gate=gate))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("names", [(), ("g",), ("gk",), ("gv",)], ids="+".join)
def test_every_dtype_equals_the_recurrence(truth, names, dtype) -> None:
    truth.compare(call(), truth.inputs(2, 70, 2, 33, 17, *names, dtype=dtype))


@pytest.mark.parametrize("T", [0, 1, 2, 15, 16, 17, 63, 64, 65, 127])
@pytest.mark.parametrize("names", [("g",), ("gk",)], ids="+".join)
def test_every_length_equals_the_recurrence(truth, names, T) -> None:
    truth.compare(call(), truth.inputs(2, T, 1, 5, 3, *names))


@pytest.mark.parametrize(("K", "V"), [(1, 1), (1, 8), (60, 65), (100, 33), (192, 16), (16, 256), (512, 24)])
@pytest.mark.parametrize("names", [("g",), ("gk",)], ids="+".join)
def test_every_width_equals_the_recurrence(truth, names, K, V) -> None:
    truth.compare(call(), truth.inputs(1, 34, 1, K, V, *names))


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("state_v_first", [False, True], ids=["kv", "vk"])
@pytest.mark.parametrize("offsets", [None, PACKED, [0, 0, 16], [0, 0], [0, 1, 2, 3]], ids=str)
@pytest.mark.parametrize("names", [("g",), ("gk", "gv")], ids="+".join)
def test_packing_direction_and_layout_equal_the_recurrence(truth, names, offsets, state_v_first, reverse) -> None:
    B, T, N = (2, 75, 2) if offsets is None else (1, offsets[-1], len(offsets) - 1)
    data = truth.inputs(B, T, 2, 6, 6, *names, N=N)
    options = {"reverse": reverse, "state_v_first": state_v_first}
    if offsets is not None:
        options["cu_seqlens"] = torch.tensor(offsets, dtype=torch.int32)
    truth.compare(call(**options), data, offsets=offsets, reverse=reverse)


def test_no_gate_equals_the_recurrence(truth) -> None:
    truth.compare(call(), truth.inputs(1, 81, 2, 9, 12))


def test_long_runs_of_strong_decay_stay_finite_and_right(truth) -> None:
    # N01: rows of -20 every fifth token, on top of a slow decay, over many chunks.
    data = truth.inputs(1, 300, 1, 16, 8, "gk")
    with torch.no_grad():
        data["gk"].mul_(0.01)
        data["gk"][:, ::5] = -20
    truth.compare(call(), data)


def test_decays_down_to_minus_sixty_have_right_gradients(truth) -> None:
    data = truth.inputs(1, 128, 2, 16, 8, "gk", dtype=torch.float32)  # N03
    with torch.no_grad():
        data["gk"].copy_(-10 - 50 * torch.rand_like(data["gk"]))
    truth.compare(call(), data)


def test_gate_gradients_do_not_cancel_under_strong_decay(truth) -> None:
    # Every pair of tokens is worth about e^-20 here; sums of q dq - k dk would leave rounding noise of size 1.
    data = truth.inputs(1, 64, 1, 8, 8, "g", dtype=torch.float32)
    with torch.no_grad():
        data["g"].fill_(-20)
    truth.compare(call(), data)


def test_a_scale_is_linear_and_none_is_one_over_root_k(truth) -> None:
    data = truth.inputs(1, 40, 2, 16, 4)  # N10
    truth.compare(call(scale=0.25), data, scale=0.25)
    base = linear_attention(data["q"], data["k"], data["v"])[0]
    torch.testing.assert_close(linear_attention(data["q"], data["k"], data["v"], scale=1.0)[0], base * 4)


@pytest.mark.parametrize("names", [("g",), ("gk",)], ids="+".join)
def test_no_state_and_a_zero_state_give_equal_bits(truth, names) -> None:
    # N24: and the first token's decay has nothing to act on.
    grads = []
    for state in (None, torch.zeros(1, 2, 8, 8)):
        data = truth.inputs(1, 40, 2, 8, 8, *names)
        del data["h0"]
        o, S = linear_attention(**data, initial_state=state, output_final_state=True)
        (o.sum() + S.sum()).backward()
        assert not data[names[0]].grad[:, 0].any()
        grads.append([o, S, *(x.grad for x in data.values())])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("names", [("g",), ("gk", "gv")], ids="+".join)
def test_equal_calls_give_equal_bits(truth, names) -> None:
    runs = []
    for _ in range(2):
        data = truth.inputs(1, 134, 2, 8, 8, *names, N=5)
        h0 = data.pop("h0")
        o, S = linear_attention(**data, initial_state=h0, output_final_state=True, cu_seqlens=torch.tensor(PACKED))
        (o.square().sum() + S.square().sum()).backward()
        runs.append([o, S, h0.grad, *(x.grad for x in data.values())])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_views_of_one_projection_and_expanded_gates(truth) -> None:
    # S04: odd T, slices with foreign strides; S03: a gate that is a view.
    torch.manual_seed(0)
    fused = torch.randn(1, 37, 3 * 2 * 8, requires_grad=True)
    gate = torch.randn(1, 37, 2, 1).neg().exp().neg().requires_grad_()
    results = []
    for contiguous in (False, True):
        q, k, v = (x.unflatten(-1, (2, 8)) for x in fused.chunk(3, -1))
        gk = gate.expand(1, 37, 2, 8)
        if contiguous:
            q, k, v, gk = (x.contiguous() for x in (q, k, v, gk))
        o, S = linear_attention(q, k, v, gk=gk, output_final_state=True)
        results.append([o, S, *torch.autograd.grad(o.square().sum() + S.square().sum(), (fused, gate))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    transposed = torch.randn(2, 2, 37, 8).transpose(1, 2)
    torch.testing.assert_close(
        linear_attention(transposed, transposed, transposed)[0],
        linear_attention(*[transposed.contiguous()] * 3)[0],
    )


def test_an_initial_state_is_never_changed(truth) -> None:
    for T in (1, 20):
        data = truth.inputs(2, T, 1, 4, 4, "g")
        before = data["h0"].detach().clone()
        h0 = data.pop("h0")
        _, S = linear_attention(**data, initial_state=h0, output_final_state=True)
        assert torch.equal(h0, before)
        assert S.data_ptr() != h0.data_ptr()


def test_a_half_precision_state_is_read_in_float32(truth) -> None:
    data = truth.inputs(2, 20, 1, 4, 4, "gk", dtype=torch.bfloat16)
    truth.compare(call(), data)


def test_autocast_does_not_reach_inside() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 40, 1, 16, requires_grad=True) for _ in range(3))
    g = -torch.rand(1, 40, 1, 16)
    want = torch.autograd.grad(linear_attention(q, k, v, gk=g)[0].sum(), (q, k, v))
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(linear_attention(q, k, v, gk=g)[0].sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_large_states_do_not_overflow_half_precision_products() -> None:
    q = torch.full((1, 20, 1, 8), 0.5, dtype=torch.float16)  # D02
    v = torch.zeros(1, 20, 1, 8, dtype=torch.float16)
    o, S = linear_attention(q, q, v, initial_state=torch.full((1, 1, 8, 8), 1e4), output_final_state=True, scale=0.1)
    assert o.isfinite().all()
    torch.testing.assert_close(o.float(), torch.full_like(o, 4000, dtype=torch.float32), rtol=1e-3, atol=0)
    assert S.eq(1e4).all()


def test_a_second_derivative_is_refused_rather_than_wrong() -> None:
    q = torch.randn(1, 20, 1, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(linear_attention(q, q, q)[0].square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()
