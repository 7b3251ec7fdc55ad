# SPDX-License-Identifier: MIT
"""The write gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fla.ops._common.checks import check_floating, check_tensor
from fla.ops._common.gates import compute_dtype
from fla.ops._common.single import once, probes


class _BetaSigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        y = x.to(compute_dtype(x.dtype)).sigmoid()
        ctx.save_for_backward(y)
        ctx.probes = () if scale == 1.0 else probes(x)
        ctx.scale, ctx.dtype = scale, x.dtype
        return y if scale == 1.0 else y * scale

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return (ctx.scale * dy * y * (1 - y)).to(ctx.dtype), None


def fused_beta_sigmoid(x: Tensor, scale: float = 1.0) -> Tensor:
    """``scale * sigmoid(x)`` in float32 (float64 for float64), differentiable.

    Args:
        x: any shape and floating dtype.
        scale: 2.0 gives write strengths in (0, 2), which allow negative eigenvalues.

    Raises:
        DtypeError: (ValueError, AssertionError, TypeError) ``x`` is not a floating tensor.
    """
    check_tensor("x", x)
    check_floating(x=x)
    return _BetaSigmoid.apply(x, scale)
