# SPDX-License-Identifier: MIT
"""Softmax over the last axis and its gradient, in float32. Differentiable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fla.backends import needs_backward
from fla.ops._common.single import once
from fla.ops.utils.core import softmax, softmax_grad, softmax_grad_formula

__all__ = ["softmax_bwd", "softmax_fwd"]


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        p = softmax(x, dtype)
        ctx.save_for_backward(p)
        ctx.dtype = x.dtype
        return p

    @staticmethod
    @once
    def backward(ctx: Any, dp: Tensor) -> tuple[Tensor, None]:
        (p,) = ctx.saved_tensors
        return softmax_grad(p, dp, ctx.dtype), None


def softmax_fwd(x: Tensor, dtype: torch.dtype | None = torch.float) -> Tensor:
    """Softmax of ``[..., D]`` over D; the result has `dtype`, None for that of x."""
    dtype = dtype or x.dtype
    return _Softmax.apply(x, dtype) if needs_backward((x,)) else softmax(x, dtype)


def softmax_bwd(p: Tensor, dp: Tensor, dtype: torch.dtype | None = torch.float) -> Tensor:
    """``p (dp - sum(p dp))``: gradient of the input of softmax from its result `p` and `dp`, both ``[..., D]``."""
    if needs_backward((p, dp)):
        return softmax_grad_formula(p, dp, dtype or p.dtype)
    return softmax_grad(p, dp, dtype or p.dtype)
