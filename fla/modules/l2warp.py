# SPDX-License-Identifier: MIT
"""A penalty on large logits that acts on gradients only, as RWKV trains with (https://github.com/BlinkDL/RWKV-LM)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fla.modules._dtype import upcast

__all__ = ["L2Wrap", "l2_warp"]


class L2Wrap(torch.autograd.Function):
    """Autograd of :func:`l2_warp`."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, logits: Tensor, l2_penalty_factor: float = 1e-4) -> Tensor:
        # The largest logits are all that is needed later: the logits themselves may be overwritten by then.
        value, column = logits.max(-1, keepdim=True)
        ctx.save_for_backward(value, column)
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        ctx.factor = l2_penalty_factor / max(1, value.numel())
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, Tensor, None]:
        value, column = ctx.saved_tensors
        grad = value.new_zeros(ctx.shape).scatter_(-1, column, (upcast(value) * ctx.factor * dloss).to(ctx.dtype))
        return dloss, grad, None


def l2_warp(loss: Tensor, logits: Tensor, l2_penalty_factor: float = 1e-4) -> Tensor:
    """``loss``, whose backward also adds ``dloss * factor / (B * T) * max(logits)`` to every largest logit's gradient.

    Args:
        loss: a scalar.
        logits: ``[B, T, V]``.
        l2_penalty_factor: strength.
    """
    return L2Wrap.apply(loss, logits, l2_penalty_factor)
