# SPDX-License-Identifier: MIT
"""The launch policy of the scalar-decay kernels is a pure rule; needs neither triton nor a GPU."""

from __future__ import annotations

import pytest
import torch

from fla.ops._common.policy import CHIPS
from fla.ops._delta.policy import long_plan, scalar_plan, time_segments

H200 = CHIPS["sm90"]


def plan(chip=H200, dtype=torch.bfloat16, K=128, V=128, heads=96):
    return scalar_plan(chip, dtype, K, V, heads, True)


def test_the_two_configurations_of_the_prototypes():
    many, few = plan(heads=96), plan(heads=64)
    assert (many.block_v, many.forward.warps, many.forward.stages) == (128, 8, 3)
    assert (few.block_v, few.forward.warps, few.forward.stages) == (64, 4, 3)
    assert many.descriptors


def test_only_the_size_class_of_the_heads_matters():
    assert plan(heads=67) is plan(heads=4096)
    assert plan(heads=1) is plan(heads=66)


def test_wide_heads_take_half_chunks_and_blocks_that_run_at_once():
    many, few = plan(K=256, V=256, heads=48), plan(K=256, V=256, heads=33)
    assert (many.chunk, many.step, many.block_v, many.forward.warps, many.forward.stages) == (64, 32, 128, 8, 3)
    assert (few.chunk, few.step, few.block_v, few.forward.warps, few.forward.stages) == (64, 32, 64, 4, 3)
    assert (many.again_v, many.recompute.warps, many.grad_k) == (64, 4, 64)
    assert plan(heads=48).step == 64


@pytest.mark.parametrize("chip", ["sm80", "sm90", "sm120"])
@pytest.mark.parametrize("K", [64, 128, 256])
def test_the_form_for_long_keys_shares_chunks_and_partial_sums(chip, K):
    p = plan(CHIPS[chip], dtype=torch.float16, K=K, V=K)
    wide = long_plan(p, K, K)
    assert (wide.chunk, wide.grad_k) == (p.chunk, p.grad_k)
    assert wide.dot == CHIPS[chip].exact
    assert not wide.descriptors
    assert wide.step <= wide.chunk


@pytest.mark.parametrize("K", [60, 100, 96])
def test_odd_head_dims_go_through_pointers(K):
    p = plan(K=K, V=K)
    assert not p.descriptors
    assert p.block_k >= K


@pytest.mark.parametrize("chip", ["sm80", "sm90", "sm100", "sm120"])
@pytest.mark.parametrize("K", [16, 64, 128, 256])
def test_pipeline_stages_fit_the_chip(chip, K):
    p = plan(CHIPS[chip], K=K, V=K)
    step = 2 * p.step * (2 * p.block_k + p.block_v + 2 * p.step)
    assert p.forward.stages == 1 or p.forward.stages * step <= CHIPS[chip].smem
    assert not (p.descriptors and p.forward.stages == 1)


def test_states_are_computed_again_by_two_programs_a_multiprocessor():
    many, few = plan(heads=96), plan(heads=64)
    assert (many.again_v, many.recompute.warps, many.recompute.stages) == (64, 4, 3)
    assert (few.again_v, few.recompute) == (few.block_v, few.forward)


def test_a_read_key_shortens_the_steps_of_the_forward_scan_only():
    p = scalar_plan(H200, torch.bfloat16, 128, 128, 96, True, True)
    assert (p.step, p.forward_step, p.forward.stages, p.reverse.stages) == (64, 32, 4, 2)
    assert plan().forward_step == plan().step == 64


def test_small_tiles_leave_registers_for_three_programs():
    assert plan(K=64, V=64).grad.regs == 168
    assert plan().grad.regs is None


def test_older_chips_use_pointers():
    assert not plan(CHIPS["sm80"]).descriptors


def test_long_sequences_of_few_heads_are_split():
    few = plan(heads=16)
    assert time_segments(few, H200, 16, 128, 512) == 4
    assert time_segments(few, H200, 1, 128, 512) == 16
    assert time_segments(few, H200, 64, 128, 512) == 1
    assert time_segments(few, H200, 16, 128, 32) == 1


def test_fp32_keeps_fp32_accuracy():
    p = plan(dtype=torch.float32)
    assert p.dot == p.inverse == "tf32x3"
