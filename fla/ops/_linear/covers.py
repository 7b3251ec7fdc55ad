# SPDX-License-Identifier: MIT
"""Which calls the scalar-decay Triton kernels cover. Needs no triton; the rest of a call runs in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from fla.ops._common.covers import Answer
from fla.ops._common.policy import chip_of

MAX_HEAD_DIM = 512


def covers_scalar(q: Tensor, v: Tensor) -> Answer:
    """Verifier of the chunked and the recurrent ops, and what every call must meet."""
    if q.dtype == torch.float64:
        return False, "the Triton kernels compute in float32, float64 runs in PyTorch"
    K, V = q.shape[-1], v.shape[-1]
    if max(K, V) > MAX_HEAD_DIM:
        return False, f"the Triton kernels take K and V up to {MAX_HEAD_DIM}, got {K} and {V}"
    chip = chip_of(q.device)
    if chip.vendor == "nvidia" and chip.arch < 80:
        return False, f"the Triton kernels need compute capability 8.0, this GPU has {chip.arch / 10}"
    return True, None


def covers_parallel(q: Tensor, v: Tensor, output_attentions: bool) -> Answer:
    """Verifier of the parallel ops."""
    if output_attentions:
        return False, "the Triton kernels never form the [T, T] scores that output_attentions=True asks for"
    return covers_scalar(q, v)


def covers_linear_attn(q: Tensor, v: Tensor, normalize: bool) -> Answer:
    """Verifier of the linear_attn ops."""
    if normalize and (0 in q.shape or 0 in v.shape):
        return False, "there is nothing to launch for axes of no length"
    return covers_scalar(q, v)
