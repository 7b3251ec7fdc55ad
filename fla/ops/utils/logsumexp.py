# SPDX-License-Identifier: MIT
"""Log of a sum of exponentials, in float32. Not differentiable."""

from __future__ import annotations

import torch
from torch import Tensor

from fla.ops._common.gates import compute_dtype

__all__ = ["logsumexp_fwd"]


@torch.no_grad()
def logsumexp_fwd(x: Tensor, scale: float | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """``log(sum(exp(scale x)))`` of ``[..., D]`` over D, ``[...]`` in float32 (float64 for float64) or in `dtype`."""
    wide = x.to(compute_dtype(x.dtype))
    y = (wide if scale is None else wide * scale).logsumexp(-1)
    return y if dtype is None else y.to(dtype)
