# SPDX-License-Identifier: MIT
"""A penalty on large logits that acts on gradients only, as RWKV trains with (https://github.com/BlinkDL/RWKV-LM)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fla.modules._dtype import upcast

__all__ = ["L2Wrap", "l2_warp"]


class _Warp(torch.autograd.Function):
    """``loss``; keeps the largest logits and where they are, of which a second derivative is made of, too."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, logits: Tensor, value: Tensor, column: Tensor, factor: float) -> Tensor:
        # Not the logits: they may be overwritten by then.
        ctx.save_for_backward(value, column)
        ctx.shape, ctx.dtype, ctx.factor = logits.shape, logits.dtype, factor
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        value, column = ctx.saved_tensors
        grad = (upcast(value) * ctx.factor * dloss).to(ctx.dtype)
        return dloss, value.new_zeros(ctx.shape).scatter(-1, column, grad), None, None, None


def l2_warp(loss: Tensor, logits: Tensor, l2_penalty_factor: float = 1e-4) -> Tensor:
    """``loss``, whose backward also adds ``dloss * factor / (B * T) * max(logits)`` to every largest logit's gradient.

    Args:
        loss: a scalar.
        logits: ``[B, T, V]``.
        l2_penalty_factor: strength.
    """
    value, column = logits.max(-1, keepdim=True)
    return _Warp.apply(loss, logits, value, column, l2_penalty_factor / max(1, value.numel()))


class L2Wrap:
    """``apply(loss, logits, l2_penalty_factor)``: :func:`l2_warp`."""

    apply = staticmethod(l2_warp)
