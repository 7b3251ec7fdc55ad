# SPDX-License-Identifier: MIT
"""Sums of what the programs of a kernel leave apart."""

from __future__ import annotations

import torch
from torch import Tensor

from fla.ops._common.kernels import sum_parts_kernel
from fla.ops._common.launch import Launcher

_sum = Launcher(sum_parts_kernel)


def sum_parts(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` `[n, ...]` in fp32, contiguous, summed over its few parts and cast to ``dtype``, in one launch."""
    out = torch.empty(x.shape[1:], dtype=dtype, device=x.device)
    _sum(-(-out.numel() // 1024), (x, out, x.shape[0], out.numel()), {"BLOCK": 1024}, {"num_warps": 4}, (out,))
    return out
