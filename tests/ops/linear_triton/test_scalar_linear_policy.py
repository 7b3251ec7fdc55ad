# SPDX-License-Identifier: MIT
"""Launch policy and verifiers of the scalar-decay linear kernels: pure rules, no GPU; needs no triton."""

from __future__ import annotations

import pytest
import torch

from fla.ops._common.policy import CHIPS
from fla.ops._linear.covers import covers_parallel, covers_scalar
from fla.ops._linear.policy import scalar_plan, time_segments

H200 = CHIPS["sm90"]


def plan(chip=H200, dtype=torch.bfloat16, K=128, V=128, heads=96):
    return scalar_plan(chip, dtype, K, V, heads)


def test_only_the_size_class_of_the_heads_matters():
    assert plan(heads=67) is plan(heads=4096)
    assert plan(heads=1) is plan(heads=66)
    assert (plan(heads=67).block_v, plan(heads=66).block_v) == (128, 64)


@pytest.mark.parametrize("chip", ["sm80", "sm90", "sm100", "sm120"])
@pytest.mark.parametrize("K", [16, 64, 128, 256])
def test_pipeline_stages_fit_the_chip(chip, K):
    p = plan(CHIPS[chip], K=K, V=K)
    step = 2 * p.chunk * (2 * p.block_k + p.block_v)
    assert p.forward.stages == 1 or p.forward.stages * step <= CHIPS[chip].smem
    assert not (p.descriptors and p.forward.stages == 1)


@pytest.mark.parametrize("K", [33, 60, 96, 100])
def test_odd_head_dims_go_through_pointers(K):
    assert not plan(K=K, V=K).descriptors


def test_long_sequences_of_few_heads_are_split():
    few = plan(heads=16)
    assert time_segments(few, H200, 16, 128, 512) == 4
    assert time_segments(few, H200, 64, 128, 512) == 1
    assert time_segments(few, H200, 16, 128, 32) == 1


def test_what_the_kernels_do_not_cover_is_refused_with_a_reason():
    def tensor(T=4, K=16, dtype=torch.float32):
        return torch.zeros(1, T, 1, K, dtype=dtype)

    x = tensor()
    for K in (1, 33, 200, 512):
        assert covers_scalar(tensor(K=K), tensor(K=513 - K)) == (True, None)
    assert "float64" in str(covers_scalar(tensor(dtype=torch.float64), x)[1])
    assert "513" in str(covers_scalar(x, tensor(K=513))[1])
    assert covers_parallel(x, x, False) == (True, None)
    assert "output_attentions" in str(covers_parallel(x, x, True)[1])
