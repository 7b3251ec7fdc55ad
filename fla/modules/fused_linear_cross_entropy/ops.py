# SPDX-License-Identifier: MIT
"""A linear layer and its cross entropy without the whole logits in memory.

The tokens are taken in chunks. The gradients of a chunk are formed while its logits exist, in the forward pass, and
only scaled in the backward pass, so that at most one chunk of logits is alive at a time.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fla.modules._dtype import accumulation_dtype, autocast_dtype, upcast
from fla.modules.fused_cross_entropy.ops import check_target, cross_entropy_bwd, cross_entropy_fwd
from fla.ops._common.checks import ArgumentError, check_choice

__all__ = [
    "fused_linear_cross_entropy_bwd",
    "fused_linear_cross_entropy_fwd",
    "fused_linear_cross_entropy_loss",
    "logsumexp_fwd",
]


def logsumexp_fwd(
    x: Tensor, scale: float | None = None, softcapping: float | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """``logsumexp`` over the last axis of ``scale * x``, capped by ``c * tanh(. / c)``; float32 unless ``dtype``."""
    z = upcast(x) if scale is None else upcast(x) * scale
    z = z if softcapping is None else softcapping * torch.tanh(z / softcapping)
    lse = torch.logsumexp(z, -1)
    return lse if dtype is None else lse.to(dtype)


def token_chunks(N: int, H: int, V: int, num_chunks: int) -> list[slice]:
    """Rows of each chunk: at most ``num_chunks``, and no more than bring a chunk's logits to the size of the inputs."""
    if N == 0:
        return []
    size = 1 << math.ceil(math.log2(math.ceil(N / max(1, min(num_chunks, math.ceil(V / H))))))
    return [slice(start, min(start + size, N)) for start in range(0, N, size)]


def add_weight_grad(dw: Tensor, grad: Tensor, h: Tensor) -> None:
    """Add ``grad.T @ h`` to ``dw``, which may be of a wider dtype."""
    if dw.dtype == grad.dtype:
        dw.addmm_(grad.t(), h)
    else:
        dw += grad.t() @ h


def _add_l2warp(grad: Tensor, peak: tuple[Tensor, Tensor], factor: Tensor | float, process_group: Any) -> None:
    """Add ``factor * max(logits)`` to the gradient of the largest logit of each row."""
    value, column = peak
    value = upcast(value)
    if process_group is not None:
        every = [torch.empty_like(value) for _ in range(dist.get_world_size(process_group))]
        dist.all_gather(every, value, group=process_group)
        # Of equal maxima the first rank's counts, as the first column does within a rank.
        winner = torch.stack(every).argmax(0) == dist.get_rank(process_group)
        value = value * winner
    grad.scatter_add_(1, column[:, None], (value * factor).to(grad.dtype)[:, None])


def fused_linear_cross_entropy_fwd(
    x: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    logit_softcapping: float | None = None,
    num_chunks: int = 8,
    reduction: str = "mean",
    use_l2warp: bool = False,
    l2_penalty_factor: float = 1e-4,
    accumulate_grad_in_fp32: bool = True,
    process_group: Any = None,
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Loss and, for a loss gradient of one, the gradients of ``x``, ``weight`` and ``bias`` that ``needs`` names."""
    (N, H), V = x.shape, weight.shape[0]
    needs_dx, needs_dw, needs_db = needs[0], needs[1], needs[2] and bias is not None
    dtype = autocast_dtype(x)
    wide = accumulation_dtype(dtype)
    with torch.autocast(x.device.type, enabled=False):
        h, w = x.to(dtype), weight.to(dtype)
        b = None if bias is None else bias.to(dtype)
        loss = torch.zeros((), dtype=wide, device=x.device)
        divisor = (target != ignore_index).sum().clamp(min=1).to(wide) if reduction == "mean" else loss + 1
        dx = torch.empty_like(h) if needs_dx else None
        dw = torch.zeros_like(w, dtype=wide if accumulate_grad_in_fp32 else weight.dtype) if needs_dw else None
        db = None
        if needs_db and bias is not None:
            db = torch.zeros_like(bias, dtype=wide if accumulate_grad_in_fp32 else bias.dtype)
        options = (label_smoothing, logit_scale, 0.0, logit_softcapping, ignore_index)
        for rows in token_chunks(N, H, V, num_chunks):
            logits, labels = F.linear(h[rows], w, b), target[rows]
            losses, _, lse, total, first = cross_entropy_fwd(logits, labels, *options, process_group)
            loss = loss + losses.sum() / divisor
            if not (needs_dx or needs_dw or needs_db):
                continue
            peak = logits.max(-1) if use_l2warp else None
            each = (1 / divisor).expand(labels.shape[0])
            grad = cross_entropy_bwd(logits, labels, lse, each, *options, total, first, inplace_backward=True)
            if peak is not None:
                _add_l2warp(grad, peak, l2_penalty_factor / N, process_group)
            if dx is not None:
                torch.mm(grad, w, out=dx[rows])
            if dw is not None:
                add_weight_grad(dw, grad, h[rows])
            if db is not None:
                db += grad.sum(0, dtype=db.dtype)
        if dx is not None and process_group is not None:
            dist.all_reduce(dx, group=process_group)
    return (
        loss,
        None if dx is None else dx.to(x.dtype),
        None if dw is None else dw.to(weight.dtype),
        None if db is None or bias is None else db.to(bias.dtype),
    )


def fused_linear_cross_entropy_bwd(
    do: Tensor, dx: Tensor | None, dw: Tensor | None, db: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Scale the gradients by that of the loss. New tensors, so that a retained graph can be run again."""
    scaled = tuple(None if g is None else g * do.to(g.dtype) for g in (dx, dw, db))
    return scaled[0], scaled[1], scaled[2]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[2], ctx.needs_input_grad[3])
        loss, *grads = fused_linear_cross_entropy_fwd(x, target, weight, bias, **options, needs=needs)
        ctx.save_for_backward(*grads)
        return loss

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw, db = fused_linear_cross_entropy_bwd(do, *ctx.saved_tensors)
        return dx, None, dw, db, None


def fused_linear_cross_entropy_loss(
    x: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    logit_softcapping: float | None = None,
    num_chunks: int = 8,
    reduction: str = "mean",
    use_l2warp: bool = False,
    l2_penalty_factor: float = 1e-4,
    accumulate_grad_in_fp32: bool = True,
    process_group: Any = None,
) -> Tensor:
    """Cross entropy of ``F.linear(x, weight, bias)``, a float32 scalar.

    Args:
        x: ``[N, H]``.
        target: ``[N]``, class ids or ``ignore_index``.
        weight: ``[V, H]``; with ``process_group`` this rank's equal share of the classes.
        bias: ``[V]``.
        ignore_index, label_smoothing, logit_scale, logit_softcapping: as for
            :func:`fla.modules.fused_cross_entropy.cross_entropy_loss`.
        num_chunks: upper bound on the number of chunks of tokens.
        reduction: ``"mean"`` over rows that are not ignored (0 when all are) or ``"sum"``.
        use_l2warp: add ``l2_penalty_factor / N * max(logits)`` to the gradient of the largest logit of every row; the
            value of the loss stays as it is.
        accumulate_grad_in_fp32: sum the chunks' weight gradients in float32.
        process_group: ranks that share the classes; ``x`` and ``target`` are the same on all of them.

    Raises:
        ArgumentError: shapes that do not fit, another reduction, or (on the CPU) a target that is not a class.
    """
    check_choice("reduction", reduction, ("mean", "sum"))
    if x.dim() != 2 or weight is None or weight.dim() != 2 or weight.shape[1] != x.shape[1]:
        raise ArgumentError(
            f"`x` must have shape [N, H] and `weight` [V, H], got {list(x.shape)} and "
            f"{None if weight is None else list(weight.shape)}."
        )
    V = weight.shape[0]
    if bias is not None and bias.shape != (V,):
        raise ArgumentError(f"`bias` must have shape [V] with V = {V}, got {list(bias.shape)}.")
    ranks = 1 if process_group is None else dist.get_world_size(process_group)
    check_target(x, target, V * ranks, ignore_index)
    options = {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "logit_scale": logit_scale,
        "logit_softcapping": logit_softcapping,
        "num_chunks": num_chunks,
        "reduction": reduction,
        "use_l2warp": use_l2warp,
        "l2_penalty_factor": l2_penalty_factor,
        "accumulate_grad_in_fp32": accumulate_grad_in_fp32,
        "process_group": process_group,
    }
    return _LinearCrossEntropy.apply(x, target, weight, bias, options)
