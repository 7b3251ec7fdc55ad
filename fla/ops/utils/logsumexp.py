# SPDX-License-Identifier: MIT
"""Log of a sum of exponentials, in float32. Differentiable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fla.backends import needs_backward
from fla.ops._common.gates import compute_dtype
from fla.ops._common.single import once
from fla.ops.utils.core import logsumexp

__all__ = ["logsumexp_fwd"]


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        y = logsumexp(x, scale, compute_dtype(x.dtype))
        ctx.save_for_backward(x, y)
        ctx.scale = scale
        return y.to(dtype)

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        x, y = ctx.saved_tensors
        weight = (x.to(y.dtype) * ctx.scale - y.unsqueeze(-1)).exp()
        return (weight * (dy.to(y.dtype) * ctx.scale).unsqueeze(-1)).to(x.dtype), None, None


def logsumexp_fwd(x: Tensor, scale: float | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """``log(sum(exp(scale x)))`` of ``[..., D]`` over D, ``[...]`` in float32 (float64 for float64) or in `dtype`."""
    factor, dtype = 1.0 if scale is None else scale, dtype or compute_dtype(x.dtype)
    return _LogSumExp.apply(x, factor, dtype) if needs_backward((x,)) else logsumexp(x, factor, dtype)
