# SPDX-License-Identifier: MIT
"""Which calls the Triton kernels of the engines cover at all. Needs no triton; the rest of a call runs in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from fla.ops._common.policy import chip_of

MAX_HEAD_DIM = 256

Answer = tuple[bool, str | None]


def covers_chunk(q: Tensor, v: Tensor) -> Answer:
    """Verifier of what runs through the kernels: ``(True, None)``, or False and the reason."""
    if q.dtype == torch.float64:
        return False, "the Triton kernels compute in float32, float64 runs in PyTorch"
    if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM:
        return False, f"the Triton kernels take K and V up to {MAX_HEAD_DIM}, got {q.shape[-1]} and {v.shape[-1]}"
    chip = chip_of(q.device)
    if chip.vendor == "nvidia" and chip.arch < 80:
        return False, f"the Triton kernels need compute capability 8.0, this GPU has {chip.arch / 10}"
    return True, None
