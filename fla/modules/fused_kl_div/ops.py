# SPDX-License-Identifier: MIT
"""Distillation through two linear layers, chunk by chunk as :mod:`fla.modules.fused_linear_cross_entropy` does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fla.backends import dispatch
from fla.backends.devices import has_triton_driver
from fla.modules._covers import TRANSFORMED
from fla.modules._dtype import accumulation_dtype, autocast_dtype
from fla.modules._facts import ROWS
from fla.modules._loss.products import add_weight_grad, linear_, logits_buffer, token_chunks
from fla.modules._loss.torch_rows import divergence_
from fla.modules.fused_linear_cross_entropy.ops import fused_linear_cross_entropy_bwd
from fla.ops._common.checks import ArgumentError, check_floating, check_same_device
from fla.ops._common.single import once, probes, transformed

__all__ = [
    "fused_kl_div_backward",
    "fused_kl_div_bwd",
    "fused_kl_div_forward",
    "fused_kl_div_fwd",
    "fused_kl_div_loss",
]


Divergence = Callable[[Tensor, Tensor, float, bool], Tensor]


def run_chunks(
    x: Tensor,
    target_x: Tensor,
    weight: Tensor,
    target_weight: Tensor,
    reduction: str,
    accumulate_grad_in_fp32: bool,
    use_dx: bool,
    use_dw: bool,
    divergence: Divergence,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Loss and, for a loss gradient of one, the gradients of ``x`` and ``weight`` that are asked for."""
    (N, H), V = x.shape, weight.shape[0]
    dtype, teacher_dtype = autocast_dtype(x), autocast_dtype(target_x)
    wide = accumulation_dtype(dtype)
    scale = 1 / max(1, N) if reduction == "batchmean" else 1.0
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        h, w = x.to(dtype), weight.to(dtype)
        ht, wt = target_x.to(teacher_dtype), target_weight.to(teacher_dtype)
        losses = torch.zeros(N, dtype=wide, device=x.device)
        dx = torch.empty_like(h, memory_format=torch.contiguous_format) if use_dx else None
        dw = None
        if use_dw:
            dw = torch.empty(V, H, dtype=wide if accumulate_grad_in_fp32 else weight.dtype, device=x.device)
            dw = dw.zero_() if N == 0 else dw
        room = V * H * weight.dtype.itemsize if dw is not None and dw.dtype != weight.dtype else 0
        chunks = token_chunks(N, H, V, 8, dtype.itemsize + teacher_dtype.itemsize, room)
        most = chunks[0].stop if chunks else 0
        ours, theirs = (logits_buffer(most, V, d, x.device) for d in (dtype, teacher_dtype))
        for rows in chunks:
            n = rows.stop - rows.start
            student, teacher = linear_(ours[:n], h[rows], w, None), linear_(theirs[:n], ht[rows], wt, None)
            losses[rows] = divergence(student, teacher, scale, use_dx or use_dw)
            if dx is not None:
                torch.mm(student, w, out=dx[rows])
            if dw is not None:
                add_weight_grad(dw, student, h[rows], first=rows.start == 0)
            del student, teacher
        # Before the gradients are converted: that is when most memory is taken.
        del ours, theirs
        loss = losses.sum() * scale
    return loss, None if dx is None else dx.to(x.dtype), None if dw is None else dw.to(weight.dtype)


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
    run = divergence_
    if has_triton_driver(x.device.type) and x.dtype != torch.float64:
        from fla.modules._loss.entry import divergence_ as run
    return run_chunks(
        x, target_x, weight, target_weight, reduction, accumulate_grad_in_fp32, use_dx, use_dw, run
    )  # fmt: skip


def fused_kl_div_bwd(do: Tensor, dx: Tensor | None, dw: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Scale the gradients by that of the loss. New tensors, so that a retained graph can be run again."""
    dx, dw, _ = fused_linear_cross_entropy_bwd(do, dx, dw, None)
    return dx, dw


fused_kl_div_forward = fused_kl_div_fwd
fused_kl_div_backward = fused_kl_div_bwd


class _LinearKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        target_x: Tensor,
        weight: Tensor,
        target_weight: Tensor,
        reduction: str,
        fp32: bool,
        divergence: Divergence,
        grad: bool,
    ) -> Tensor:
        dx, dw = grad and ctx.needs_input_grad[0], grad and ctx.needs_input_grad[2]
        loss, *grads = run_chunks(x, target_x, weight, target_weight, reduction, fp32, dx, dw, divergence)
        ctx.save_for_backward(*grads)
        ctx.probes = probes(x, weight)
        return loss

    @staticmethod
    @once
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = fused_kl_div_bwd(do, *ctx.saved_tensors)
        return dx, None, dw, None, None, None, None, None


def differentiable(
    x: Tensor,
    target_x: Tensor,
    weight: Tensor,
    target_weight: Tensor,
    reduction: str,
    fp32: bool,
    divergence: Divergence,
) -> Tensor:
    """The loss by one of the two implementations of the divergence of rows, with autograd."""
    # What requires a gradient does so under no_grad too, where none is wanted.
    grad = torch.is_grad_enabled()
    return _LinearKL.apply(x, target_x, weight, target_weight, reduction, fp32, divergence, grad)


class _Pair:
    """Forward and backward for torch.compile: the gradients come with the loss there too."""

    def forward(self, *args: Any) -> tuple[Tensor, Sequence[Tensor]]:
        loss, dx, dw = fused_kl_div_fwd(*args)
        assert dx is not None
        assert dw is not None
        return loss, (dx, dw)

    def saved(self, *args: Any) -> Sequence[Tensor]:
        return [t.new_empty(t.shape) for t in (args[0], args[2])]

    def backward(
        self,
        args: tuple[Any, ...],
        saved: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        needed: Sequence[bool],
    ) -> Sequence[Tensor | None]:
        do = grads[0]
        if do is None:
            return (None,) * 4
        dx, dw = (g * do.to(g.dtype) if n else None for g, n in zip(saved, (needed[0], needed[2]), strict=True))
        return (dx, None, dw, None)


def _outputs(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=accumulation_dtype(autocast_dtype(x)))


def _covers(x: Tensor, target_x: Tensor) -> tuple[bool, str | None]:
    if transformed():
        return TRANSFORMED
    if torch.float64 in (x.dtype, target_x.dtype):
        return False, "the Triton kernels compute in float32, float64 runs in PyTorch"
    return True, None


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


@dispatch(
    "modules",
    facts=ROWS,
    validate=_check,
    outputs=_outputs,
    triton="fla.modules._loss.entry:fused_kl_div_loss",
    triton_verifier=_covers,
)
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
    return differentiable(x, target_x, weight, target_weight, reduction, accumulate_grad_in_fp32, divergence_)


fused_kl_div_loss.op.pair = _Pair()  # type: ignore[attr-defined]
