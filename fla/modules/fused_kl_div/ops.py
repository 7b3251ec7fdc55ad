# SPDX-License-Identifier: MIT
"""Distillation through two linear layers, chunk by chunk as :mod:`fla.modules.fused_linear_cross_entropy` does it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fla.backends import dispatch
from fla.modules._dtype import accumulation_dtype, autocast_dtype, upcast
from fla.modules._facts import ROWS
from fla.modules.fused_linear_cross_entropy.ops import (
    add_weight_grad,
    fused_linear_cross_entropy_bwd,
    token_chunks,
)
from fla.ops._common.checks import ArgumentError, check_floating, check_same_device

__all__ = [
    "fused_kl_div_backward",
    "fused_kl_div_bwd",
    "fused_kl_div_forward",
    "fused_kl_div_fwd",
    "fused_kl_div_loss",
]


def fused_kl_div_fwd(
    x: Tensor,
    target_x: Tensor,
    weight: Tensor,
    target_weight: Tensor,
    reduction: str = "batchmean",
    accumulate_grad_in_fp32: bool = True,
    use_dx: bool = True,
    use_dw: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Loss and, for a loss gradient of one, the gradients of ``x`` and ``weight`` that are asked for."""
    (N, H), V = x.shape, weight.shape[0]
    dtype, teacher_dtype = autocast_dtype(x), autocast_dtype(target_x)
    wide = accumulation_dtype(dtype)
    scale = 1 / max(1, N) if reduction == "batchmean" else 1.0
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        h, w = x.to(dtype), weight.to(dtype)
        ht, wt = target_x.to(teacher_dtype), target_weight.to(teacher_dtype)
        loss = torch.zeros((), dtype=wide, device=x.device)
        dx = torch.empty_like(h) if use_dx else None
        dw = torch.zeros_like(w, dtype=wide if accumulate_grad_in_fp32 else weight.dtype) if use_dw else None
        for rows in token_chunks(N, H, V, 8):
            student = torch.log_softmax(upcast(F.linear(h[rows], w)), -1)
            teacher = torch.log_softmax(upcast(F.linear(ht[rows], wt)), -1).to(wide)
            p = teacher.exp()
            # A class that the teacher rules out (logit -inf) adds nothing, whatever the student says of it.
            loss = loss + (p * (teacher - student)).masked_fill(p == 0, 0.0).sum() * scale
            if dx is None and dw is None:
                continue
            grad = (student.exp().sub_(p).mul_(scale)).to(dtype)
            if dx is not None:
                torch.mm(grad, w, out=dx[rows])
            if dw is not None:
                add_weight_grad(dw, grad, h[rows])
    return loss, None if dx is None else dx.to(x.dtype), None if dw is None else dw.to(weight.dtype)


def fused_kl_div_bwd(do: Tensor, dx: Tensor | None, dw: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Scale the gradients by that of the loss. New tensors, so that a retained graph can be run again."""
    dx, dw, _ = fused_linear_cross_entropy_bwd(do, dx, dw, None)
    return dx, dw


fused_kl_div_forward = fused_kl_div_fwd
fused_kl_div_backward = fused_kl_div_bwd


class _LinearKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, target_x: Tensor, weight: Tensor, target_weight: Tensor, reduction: str, fp32: bool
    ) -> Tensor:
        needs = ctx.needs_input_grad
        loss, *grads = fused_kl_div_fwd(x, target_x, weight, target_weight, reduction, fp32, needs[0], needs[2])
        ctx.save_for_backward(*grads)
        return loss

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = fused_kl_div_bwd(do, *ctx.saved_tensors)
        return dx, None, dw, None, None, None


def _check(x: Tensor, target_x: Tensor, weight: Tensor, target_weight: Tensor) -> None:
    for name, teacher in (("target_x", target_x), ("target_weight", target_weight)):
        if teacher.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(f"`{name}` requires grad, but the loss is for a frozen teacher: detach it.")
    check_floating(x=x, target_x=target_x, weight=weight, target_weight=target_weight)
    check_same_device(x=x, target_x=target_x, weight=weight, target_weight=target_weight)
    for name, rows, matrix in (("", x, weight), ("target_", target_x, target_weight)):
        if rows.dim() != 2 or matrix.dim() != 2 or rows.shape[1] != matrix.shape[1]:
            raise ArgumentError(
                f"`{name}x` must have shape [N, H] and `{name}weight` [V, H], "
                f"got {list(rows.shape)} and {list(matrix.shape)}."
            )
    for name, a, b in (("x", x, target_x), ("weight", weight, target_weight)):
        if a.shape[0] != b.shape[0]:
            raise ArgumentError(f"`{name}` and `target_{name}` must have as many rows, got {a.shape[0]}, {b.shape[0]}.")


# Without `outputs`: torch.compile traces the body, whose gradients come with the forward pass and are not run again.
@dispatch("modules", facts=ROWS, validate=_check)
def fused_kl_div_loss(
    x: Tensor,
    target_x: Tensor,
    weight: Tensor,
    target_weight: Tensor,
    reduction: str = "batchmean",
    accumulate_grad_in_fp32: bool = True,
) -> Tensor:
    """``KL(teacher || student)`` of ``softmax(target_x @ target_weight.T)`` and ``softmax(x @ weight.T)``.

    Args:
        x: ``[N, H]``, inputs of the student's last layer.
        target_x: ``[N, H']``, those of the teacher.
        weight: ``[V, H]``, the student's last layer.
        target_weight: ``[V, H']``, that of the teacher.
        reduction: ``"batchmean"``, the mean over rows (0 without rows); anything else is the sum.
        accumulate_grad_in_fp32: sum the chunks' weight gradients in float32.

    Returns:
        A float32 scalar (float64 for float64 inputs) with gradients for ``x`` and ``weight``.

    Raises:
        RuntimeError: a tensor of the frozen teacher requires grad.
        ArgumentError: shapes, dtypes or devices that do not fit.
    """
    return _LinearKL.apply(x, target_x, weight, target_weight, reduction, accumulate_grad_in_fp32)
