# SPDX-License-Identifier: MIT
"""The serving entry: preallocated outputs, states in place, pools of slots, speculative decoding."""

from __future__ import annotations

import pytest
import torch

from fla.backends import use_backend
from fla.ops._common.checks import ArgumentError
from fla.ops.kda import fused_recurrent_kda
from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

H, HV, K, V = 2, 4, 8, 5


def tokens(delta, B, T, seed=0):
    x = delta.inputs(B, T, H, HV, K, V, seed=seed)
    return [x[name] for name in ("q", "k", "v", "g", "beta")]


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_state_is_overwritten_and_returned(delta, v_first, dtype) -> None:
    x = tokens(delta, 3, 4)
    state = torch.randn(3, HV, *((V, K) if v_first else (K, V))).to(dtype)
    out = torch.full_like(x[2], torch.nan)
    want_o, want = fused_recurrent_kda(*x, initial_state=state, output_final_state=True, state_v_first=v_first)
    o, final = fused_recurrent_kda_fwd(*x, initial_state=state, state_v_first=v_first, out=out)
    assert o is out
    assert final is state
    assert torch.equal(o, want_o)
    assert torch.equal(state, want.to(dtype))


def test_without_in_place_the_state_is_left_alone(delta) -> None:
    x = tokens(delta, 2, 3)
    state = torch.randn(2, HV, K, V)
    before = state.clone()
    o, final = fused_recurrent_kda_fwd(*x, initial_state=state, inplace_final_state=False, output_final_state=True)
    want_o, want = fused_recurrent_kda(*x, initial_state=before, output_final_state=True)
    assert torch.equal(state, before)
    assert torch.equal(o, want_o)
    assert torch.equal(final, want)
    assert fused_recurrent_kda_fwd(*x, inplace_final_state=False)[1] is None


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_decoding_in_a_pool_leaves_other_slots_bit_identical(delta, dtype) -> None:
    B = 3
    pool = torch.randn(3 * B, HV, K, V)
    before = pool.clone()
    slots = torch.tensor([7, 0, 4], dtype=dtype)
    state = pool[slots.long()].clone()
    for step in range(4):
        x = tokens(delta, B, 1, seed=step)
        o, final = fused_recurrent_kda_fwd(*x, initial_state=pool, ssm_state_indices=slots)
        want, state = fused_recurrent_kda(*x, initial_state=state, output_final_state=True)
        assert final is pool
        assert torch.equal(o, want)
    assert torch.equal(pool[slots.long()], state)
    others = [n for n in range(3 * B) if n not in slots.tolist()]
    assert torch.equal(pool[others], before[others])


@pytest.mark.parametrize("absent", [-1, -7, 9, 1 << 20])
def test_slots_outside_the_pool_are_skipped(delta, absent) -> None:
    pool = torch.randn(9, HV, K, V)
    before = pool.clone()
    x = tokens(delta, 3, 1)
    out = torch.full_like(x[2], 5.0)
    fused_recurrent_kda_fwd(*x, initial_state=pool, ssm_state_indices=torch.tensor([3, absent, 0]), out=out)
    want, state = fused_recurrent_kda(*x, initial_state=before[[3, 3, 0]], output_final_state=True)
    assert torch.equal(out[[0, 2]], want[[0, 2]])
    assert (out[1] == 5.0).all()
    assert torch.equal(pool[[3, 0]], state[[0, 2]])
    untouched = [1, 2, 4, 5, 6, 7, 8]
    assert torch.equal(pool[untouched], before[untouched])


def test_speculative_tokens_each_leave_their_state(delta) -> None:
    """Verify 4 draft tokens, accept 2 of them, go on from there (bug case G20)."""
    pool = torch.randn(12, HV, K, V)
    start = pool[[2, 9]].clone()
    slots = torch.tensor([[2, 3, 4, 5], [9, 8, 7, 6]])
    drafts = tokens(delta, 2, 4)
    o, _ = fused_recurrent_kda_fwd(*drafts, initial_state=pool, ssm_state_indices=slots)
    state = start
    for t in range(4):
        want, state = fused_recurrent_kda(
            *[x[:, t : t + 1] for x in drafts], initial_state=state, output_final_state=True
        )
        assert delta.error(o[:, t : t + 1], want.double()) < 1e-6
        assert delta.error(pool[slots[:, t]], state.double()) < 1e-6
    accepted = torch.tensor([2, 4])
    committed = pool[[3, 6]].clone()
    more = tokens(delta, 2, 1, seed=1)
    o, _ = fused_recurrent_kda_fwd(*more, initial_state=pool, ssm_state_indices=slots, num_accepted_tokens=accepted)
    want, state = fused_recurrent_kda(*more, initial_state=committed, output_final_state=True)
    assert torch.equal(o, want)
    assert torch.equal(pool[[2, 9]], state)


def test_accepted_tokens_out_of_range_skip_the_sequence(delta) -> None:
    """Slot table [3, -1, 0] with accepted-token counts (bug case G15)."""
    pool = torch.randn(6, HV, K, V)
    before = pool.clone()
    slots = torch.tensor([[3, 4], [-1, -1], [0, 1]])
    x = tokens(delta, 3, 1)
    o, _ = fused_recurrent_kda_fwd(
        *x, initial_state=pool, ssm_state_indices=slots, num_accepted_tokens=torch.tensor([2, 0, 3])
    )
    want, state = fused_recurrent_kda(*x, initial_state=before[[4, 0, 0]], output_final_state=True)
    assert torch.equal(o[0], want[0])
    assert (o[1:] == 0).all()
    assert torch.equal(pool[3], state[0])
    assert torch.equal(pool[[0, 1, 2, 4, 5]], before[[0, 1, 2, 4, 5]])


def test_packed_sequences_with_empty_ones_in_a_pool(delta) -> None:
    x = tokens(delta, 1, 6)
    cu = torch.tensor([0, 0, 2, 2, 6])
    for slots in (
        torch.tensor([1, 5, 0, 3]),
        torch.tensor([[1, -1, -1, -1], [5, 6, -1, -1], [0, -1, -1, -1], [3, 2, 4, 3]]),
    ):
        pool = torch.randn(7, HV, K, V)
        before = pool.clone()
        first = slots if slots.dim() == 1 else slots[:, 0]
        o, _ = fused_recurrent_kda_fwd(*x, initial_state=pool, ssm_state_indices=slots, cu_seqlens=cu)
        want, state = fused_recurrent_kda(*x, initial_state=before[first], output_final_state=True, cu_seqlens=cu)
        assert delta.error(o, want.double()) < 1e-6
        assert delta.error(pool[3], state[3].double()) < 1e-6
        assert torch.equal(pool[[0, 1]], before[[0, 1]])


def test_states_of_every_token_without_in_place(delta) -> None:
    x = tokens(delta, 2, 3)
    pool = torch.randn(4, HV, K, V)
    slots = torch.tensor([[0, 1, 2], [3, 1, 2]])
    _, states = fused_recurrent_kda_fwd(
        *x, initial_state=pool, ssm_state_indices=slots, inplace_final_state=False, output_final_state=True
    )
    _, want = fused_recurrent_kda(*x, initial_state=pool[[0, 3]], output_final_state=True)
    assert states.shape == (6, HV, K, V)
    assert torch.equal(states[[2, 5]], want)


def test_a_strided_pool_and_beta_per_channel(delta) -> None:
    x = tokens(delta, 2, 1)
    x[4] = torch.rand(2, 1, HV, V)
    wide = torch.randn(5, 3, HV, K, V)
    before = wide.clone()
    o, _ = fused_recurrent_kda_fwd(*x, initial_state=wide[:, 1], ssm_state_indices=torch.tensor([4, 2]))
    want, state = fused_recurrent_kda(*x, initial_state=before[[4, 2], 1], output_final_state=True)
    assert torch.equal(o, want)
    assert torch.equal(wide[[4, 2], 1], state)
    assert torch.equal(wide[:, [0, 2]], before[:, [0, 2]])


def refuse(delta, match, error=ArgumentError, T=1, **changes):
    x = tokens(delta, 2, T)
    pool = torch.randn(4, HV, K, V)
    before = pool.clone()
    with pytest.raises(error, match=match):
        fused_recurrent_kda_fwd(*x, **{"initial_state": pool, "ssm_state_indices": torch.tensor([0, 1]), **changes})
    assert torch.equal(pool, before)


def test_bad_calls_change_nothing(delta) -> None:
    refuse(delta, "needs `initial_state`", AssertionError, initial_state=None)
    refuse(delta, "`out` must be like `v`", AssertionError, out=torch.empty(2, 1, HV, V + 1))
    refuse(delta, "`initial_state` must have shape", initial_state=torch.randn(4, HV, K, V + 1))
    refuse(delta, "other layout", initial_state=torch.randn(4, HV, V, K))
    refuse(delta, "`ssm_state_indices` must be int32 or int64", TypeError, ssm_state_indices=torch.tensor([0.0, 1.0]))
    refuse(delta, "one row per sequence", ssm_state_indices=torch.tensor([0, 1, 2]))
    refuse(delta, "both write slot 1", ssm_state_indices=torch.tensor([1, 1]))
    refuse(delta, "column for each of the 3 tokens, got 2", T=3, ssm_state_indices=torch.tensor([[0, 1], [2, 3]]))
    refuse(delta, "slot per draft token", num_accepted_tokens=torch.tensor([1, 1]))
    refuse(delta, "needs `ssm_state_indices`", ssm_state_indices=None, initial_state=torch.randn(2, HV, K, V),
           num_accepted_tokens=torch.tensor([1, 1]))  # fmt: skip
    refuse(delta, "number of initial states", ssm_state_indices=None)
    refuse(delta, "unexpected keyword", TypeError, unknown=1)


def test_gradients_are_never_dropped_silently(delta) -> None:
    x = tokens(delta, 2, 1)
    x[0].requires_grad_()
    state = torch.zeros(2, HV, K, V)
    with pytest.raises(ArgumentError, match="computes no gradients"):
        fused_recurrent_kda_fwd(*x, initial_state=state)
    with torch.no_grad():
        fused_recurrent_kda_fwd(*x, initial_state=state)


def test_a_sequence_may_not_start_where_another_writes(delta) -> None:
    """Which of the two is first is nobody's choice on a GPU."""
    x = tokens(delta, 2, 1)
    pool = torch.randn(4, HV, K, V)
    before = pool.clone()
    slots = torch.tensor([[0, 1], [2, 0]])
    with pytest.raises(ArgumentError, match="sequence 1 start from slot 0, which sequence 0 writes"):
        fused_recurrent_kda_fwd(
            *x, initial_state=pool, ssm_state_indices=slots, num_accepted_tokens=torch.tensor([1, 2])
        )
    assert torch.equal(pool, before)
    fused_recurrent_kda_fwd(*x, initial_state=pool, ssm_state_indices=slots, num_accepted_tokens=torch.tensor([1, 1]))
    assert torch.equal(pool[[1, 3]], before[[1, 3]])


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", ["initial_state", "out"])
def test_what_is_written_needs_memory_of_its_own(delta, backend, name) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    q, k, v, g, beta = tokens(delta, 2, 1)
    given = {"initial_state": torch.randn(2, HV, K, V), "out": torch.zeros_like(v)}
    with use_backend(backend, strict=True):
        fused_recurrent_kda_fwd(q, k, v, g, beta, **given)
        given[name] = given[name][:1].expand_as(given[name])
        before = {n: t.clone() for n, t in given.items()}
        with pytest.raises(ArgumentError, match=f"`{name}` is written to, but its elements share memory"):
            fused_recurrent_kda_fwd(q, k, v, g, beta, **given)
        for n, t in given.items():
            assert torch.equal(t, before[n])
        if name == "initial_state":
            fused_recurrent_kda_fwd(q, k, v, g, beta, **given, inplace_final_state=False)
