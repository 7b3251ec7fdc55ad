# SPDX-License-Identifier: MIT
"""Softmax over the last axis and its gradient, in float32. Not differentiable."""

from __future__ import annotations

import torch
from torch import Tensor

from fla.ops._common.gates import compute_dtype

__all__ = ["softmax_bwd", "softmax_fwd"]


@torch.no_grad()
def softmax_fwd(x: Tensor, dtype: torch.dtype | None = torch.float) -> Tensor:
    """Softmax of ``[..., D]`` over D; the result has `dtype`, None for that of x."""
    return x.to(compute_dtype(x.dtype)).softmax(-1).to(dtype or x.dtype)


@torch.no_grad()
def softmax_bwd(p: Tensor, dp: Tensor, dtype: torch.dtype | None = torch.float) -> Tensor:
    """``p (dp - sum(p dp))``: gradient of the input of softmax from its result `p` and `dp`, both ``[..., D]``."""
    wide = compute_dtype(p.dtype)
    q, dq = p.to(wide), dp.to(wide)
    return (q * (dq - (q * dq).sum(-1, keepdim=True))).to(dtype or p.dtype)
