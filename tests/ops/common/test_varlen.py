# SPDX-License-Identifier: MIT
"""Chunk plans: every token once, steps of consecutive chunks, states in and out of order."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fla.ops._common import varlen
from fla.ops._common.varlen import host_offsets, longest_sequence, plan_chunks

CPU = torch.device("cpu")


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_default_device_does_not_matter(device) -> None:
    cu = torch.tensor([0, 3, 8])
    varlen._packed_plan.cache_clear()
    with torch.device(device):
        plan = plan_chunks(1, 8, 4, CPU, cu)
    assert torch.equal(plan.unpack(plan.pack(cu.new_ones(1, 8))), cu.new_ones(1, 8))


def plan_of(lengths, chunk, uncovered=0):
    cu = torch.tensor([0, *itertools.accumulate(lengths)])
    return cu, plan_chunks(1, int(cu[-1]) + uncovered, chunk, CPU, cu)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.sampled_from([1, 4, 16]), st.integers(0, 5))
def test_packing_places_every_token_once(lengths, chunk, uncovered) -> None:
    cu, plan = plan_of(lengths, chunk, uncovered)
    T = int(cu[-1]) + uncovered
    x = torch.arange(1, T + 1, dtype=torch.float64).view(1, T, 1)
    packed = plan.pack(x)
    assert packed.shape == (plan.chunks, chunk, 1)
    assert list(plan.steps) == sorted(plan.steps, reverse=True)
    assert plan.chunks == sum(-(-n // chunk) for n in lengths)
    covered = x.clone()
    covered[:, int(cu[-1]) :] = 0
    assert torch.equal(plan.unpack(packed), covered)
    assert int((packed != 0).sum()) == int(cu[-1])
    # Step by step, the active sequences are the first ones in the sorted order.
    order = plan.order.tolist()
    row = 0
    for step, active in enumerate(plan.steps):
        for place in range(active):
            start = int(cu[order[place]]) + step * chunk
            end = min(start + chunk, int(cu[order[place] + 1]))
            assert packed[row, : end - start, 0].tolist() == list(range(start + 1, end + 1))
            row += 1


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=8))
def test_states_return_to_their_sequences(lengths) -> None:
    _, plan = plan_of(lengths, 16)
    states = torch.arange(len(lengths))
    assert torch.equal(plan.unsort_states(plan.sort_states(states)), states)
    rows = torch.arange(plan.chunks)
    in_sequence = plan.chunk_states(rows)[0]
    counts = [-(-n // 16) for n in lengths]
    assert in_sequence.shape == (sum(counts),)
    packed = plan.pack(torch.arange(sum(lengths)).view(1, -1, 1) + 1)
    firsts = packed[in_sequence, 0, 0]
    assert firsts.tolist() == sorted(firsts.tolist())


@pytest.mark.parametrize("T", [0, 1, 15, 16, 17, 48])
def test_fixed_lengths(T) -> None:
    plan = plan_chunks(3, T, 16, CPU)
    x = torch.randn(3, T, 2, 5)
    packed = plan.pack(x)
    assert plan.steps == (3,) * -(-T // 16)
    assert packed.shape == (3 * len(plan.steps), 16, 2, 5)
    assert torch.equal(plan.unpack(packed), x)
    assert plan.unpack(packed).is_contiguous()


def test_packing_is_differentiable_both_ways() -> None:
    _, plan = plan_of([0, 5, 20, 3], 8, uncovered=2)
    x = torch.randn(1, 30, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(plan.pack, (x,))
    y = torch.randn(plan.chunks, 8, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(plan.unpack, (y,))


def test_plans_follow_the_content_of_the_offsets() -> None:
    cu = torch.tensor([0, 3, 40])
    first = plan_chunks(1, 40, 16, CPU, cu)
    assert plan_chunks(1, 40, 16, CPU, cu.clone().int()) is first
    cu[1] = 20
    assert plan_chunks(1, 40, 16, CPU, cu) is not first
    assert host_offsets(cu) == (0, 20, 40)
    assert host_offsets(torch.empty(3, device="meta"), cu) == (0, 20, 40)
    assert longest_sequence(40, cu) == 20
    assert longest_sequence(7) == 7


def test_a_plan_made_in_inference_mode_serves_training() -> None:
    cu = torch.tensor([0, 9, 33])
    with torch.inference_mode():
        plan = plan_chunks(1, 33, 16, CPU, cu)
    x = torch.randn(1, 33, 2, requires_grad=True)
    plan.pack(x).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_packed_calls_take_axes_of_no_length() -> None:
    from fla.ops.gla import chunk_gla
    from fla.ops.utils import chunk_local_cumsum, mean_pooling

    cu = torch.tensor([0, 5, 33])
    assert chunk_local_cumsum(torch.zeros(1, 33, 0), 16, cu_seqlens=cu).shape == (1, 33, 0)
    assert mean_pooling(torch.zeros(1, 33, 0, 4), 16, cu).shape[2:] == (0, 4)
    for H, K, V in ((2, 4, 0), (2, 0, 4), (0, 4, 4)):
        q, v = torch.zeros(1, 33, H, K), torch.zeros(1, 33, H, V)
        o, final = chunk_gla(q, q, v, q, 1.0, output_final_state=True, cu_seqlens=cu)
        assert o.shape == v.shape
        assert final.shape == (2, H, K, V)
