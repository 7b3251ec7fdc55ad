# SPDX-License-Identifier: MIT
"""Launch policy and verifiers of the channel-decay kernels: pure rules, no GPU; needs no triton."""

from __future__ import annotations

import pytest
import torch

from fla.ops._common.policy import CHIPS
from fla.ops._linear.vector_covers import covers_gsa, covers_recurrent_gla, covers_vector
from fla.ops._linear.vector_policy import time_segments, vector_plan

H200 = CHIPS["sm90"]


def plan(chip=H200, dtype="bfloat16", K=128, V=128, heads=96, **kw):
    return vector_plan(chip, dtype, K, V, heads=heads, **kw)


def test_only_whether_the_heads_fill_the_chip_matters():
    assert plan(heads=67) is plan(heads=4096)
    assert plan(heads=1) is plan(heads=66)
    assert (plan(heads=67).bv, plan(heads=66).bv) == (128, 64)


@pytest.mark.parametrize("chip", ["sm80", "sm90", "sm100", "sm120"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("K", [16, 64, 128, 256, 512])
def test_blocks_divide_the_padded_sizes_and_stages_fit(chip, dtype, K):
    p = plan(CHIPS[chip], dtype, K, K)
    assert p.kp % p.kb == p.kp % p.gkb == p.vp % p.bv == p.vp % p.bv_save == p.vp % p.vb == 0
    size = 4 if dtype == "float32" else 2
    step = size * (p.chunk * (2 * p.kp + p.bv) + p.chunk**2)
    assert p.scan.stages == 1 or p.scan.stages * step < CHIPS[chip].smem


def test_misaligned_inputs_go_through_pointers():
    assert plan().tma
    assert not plan(aligned=False).tma
    assert not plan(CHIPS["sm80"]).tma


def test_long_sequences_of_few_heads_are_split():
    assert time_segments(plan(heads=16), H200, 16, 512) == 4
    assert time_segments(plan(heads=64), H200, 64, 512) == 1
    assert time_segments(plan(heads=16), H200, 16, 32) == 1


def test_what_the_kernels_do_not_cover_is_refused_with_a_reason():
    x = lambda T=40, D=16, dtype=torch.float32, grad=False: torch.zeros(1, T, 1, D, dtype=dtype, requires_grad=grad)
    assert covers_vector(x(), x()) == (True, None)
    assert "float64" in covers_vector(x(dtype=torch.float64), x())[1]
    assert "512" in covers_vector(x(D=513), x())[1]
    assert "no length" in covers_vector(x(T=0), x(T=0))[1]
    assert "512" in covers_gsa(x(), x(), x(D=600))[1]
    assert covers_recurrent_gla(x(), x(), x(), x(), None, None, True)[0]
    assert covers_recurrent_gla(x(4), x(4), x(4), x(4), x(4), None, True)[0]
    assert "together" in covers_recurrent_gla(x(), x(), x(), x(), x(), None, False)[1]
    assert "reverse" in covers_recurrent_gla(x(4, grad=True), x(4), x(4), None, None, None, True)[1]
