# SPDX-License-Identifier: MIT
"""Cross entropy of rows of logits, with its gradient: the engine of both losses.

With ``z = c * tanh(s * logits / c)`` (or ``s * logits`` without a cap `c`), ``lse = logsumexp(z)`` and `V` classes,
a row whose target is `t` costs ``lse - (1 - e) z_t - (e / V) sum(z) + lambda * lse ** 2``: label smoothing `e`, and
the z-loss `lambda * lse ** 2` of PaLM (https://arxiv.org/abs/2204.02311, section 5). Ignored rows cost nothing.
The classes may be split evenly over the ranks of a process group, in rank order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fla.modules._dtype import upcast
from fla.ops._common.checks import ArgumentError

__all__ = ["cross_entropy_bwd", "cross_entropy_fwd", "cross_entropy_loss"]


def check_target(logits: Tensor, target: Tensor, classes: int, ignore_index: int) -> None:
    """Check shape and dtype of the class ids, and their range where looking is free (CPU tensors)."""
    if logits.dim() != 2 or target.shape != logits.shape[:1]:
        raise ArgumentError(
            f"`input` must have shape [N, V] and `target` [N], got {list(logits.shape)} and {list(target.shape)}."
        )
    if target.dtype not in (torch.int64, torch.int32):
        raise ArgumentError(f"`target` must be int64 or int32, got {target.dtype}.")
    if target.device.type == "cpu" and not torch.compiler.is_compiling() and target.numel():
        wrong = ((target < 0) | (target >= classes)) & (target != ignore_index)
        if wrong.any():
            raise ArgumentError(
                f"`target` must lie in [0, {classes}) or be ignore_index = {ignore_index}, got {int(target[wrong][0])}."
            )


def _transform(logits: Tensor, scale: float, cap: float | None) -> Tensor:
    z = upcast(logits)
    if scale != 1.0:
        z = z * scale
    return z if cap is None else cap * torch.tanh(z / cap)


class _Shard(NamedTuple):
    """The classes ``[start, start + V)`` of ``total`` that this rank holds."""

    total: int
    start: int


def _shard(logits: Tensor, process_group: Any) -> _Shard:
    V = logits.shape[-1]
    if process_group is None:
        return _Shard(V, 0)
    return _Shard(V * dist.get_world_size(process_group), V * dist.get_rank(process_group))


def _local(target: Tensor, start: int, V: int) -> tuple[Tensor, Tensor]:
    """Column of each target on this rank (0 where it has none), and whether it has one. Shape ``[N, 1]``."""
    column = target.long()[:, None] - start
    mine = (column >= 0) & (column < V)
    return column.where(mine, 0), mine


def cross_entropy_fwd(
    logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    logit_softcapping: float | None = None,
    ignore_index: int = -100,
    process_group: Any = None,
) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """Loss of each row.

    Returns:
        ``loss``, ``z_loss`` (already part of ``loss``) and ``lse``, each ``[N]`` float32 (float64 for float64 logits),
        the number of classes over all ranks, and the first class of this rank.
    """
    V = logits.shape[-1]
    total, start = _shard(logits, process_group)
    z = _transform(logits, logit_scale, logit_softcapping)
    lse = torch.logsumexp(z, -1)
    column, mine = _local(target, start, V)
    # -inf logits stand for forbidden classes; 0 * -inf must not make the row NaN.
    picked = z.gather(1, column).masked_fill(~mine, 0.0).squeeze(1)
    reward = picked if label_smoothing == 0.0 else (1 - label_smoothing) * picked + label_smoothing / total * z.sum(-1)
    if process_group is not None:
        parts = [torch.empty_like(lse) for _ in range(dist.get_world_size(process_group))]
        dist.all_gather(parts, lse, group=process_group)
        lse = torch.logsumexp(torch.stack(parts), 0)
        dist.all_reduce(reward, group=process_group)
    ignored = target == ignore_index
    z_loss = (lse_square_scale * lse.square()).masked_fill(ignored, 0.0)
    loss = (lse - reward).masked_fill(ignored, 0.0) + z_loss
    return loss, z_loss, lse, total, start


def cross_entropy_bwd(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    dloss: Tensor,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    logit_softcapping: float | None = None,
    ignore_index: int = -100,
    total_classes: int | None = None,
    class_start_idx: int = 0,
    inplace_backward: bool = False,
) -> Tensor:
    """Gradient ``[N, V]`` of the logits in their dtype, written over them with ``inplace_backward``.

    Args:
        logits, target, lse: as given to and returned by :func:`cross_entropy_fwd`.
        dloss: ``[N]``, gradient of each row's loss.
    """
    V = logits.shape[-1]
    total = V if total_classes is None else total_classes
    z = _transform(logits, logit_scale, logit_softcapping)
    grad = torch.exp(z - lse[:, None])
    if lse_square_scale != 0.0:
        grad = grad * (1 + 2 * lse_square_scale * lse[:, None])
    column, mine = _local(target, class_start_idx, V)
    grad.scatter_add_(1, column, mine.to(grad.dtype) * -(1 - label_smoothing))
    if label_smoothing != 0.0:
        grad -= label_smoothing / total
    grad *= (dloss * logit_scale).masked_fill(target == ignore_index, 0.0).to(grad.dtype)[:, None]
    if logit_softcapping is not None:
        grad *= 1 - (z / logit_softcapping).square()
    return logits.copy_(grad) if inplace_backward else grad.to(logits.dtype)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, options: dict[str, Any], inplace: bool, process_group: Any
    ) -> tuple[Tensor, Tensor]:
        loss, z_loss, lse, total, start = cross_entropy_fwd(logits, target, **options, process_group=process_group)
        ctx.save_for_backward(logits, target, lse)
        ctx.options = {**options, "total_classes": total, "class_start_idx": start, "inplace_backward": inplace}
        ctx.mark_non_differentiable(z_loss)
        return loss, z_loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, lse = ctx.saved_tensors
        # Writing over the saved logits is what the caller asked for; detached, autograd does not object.
        logits = logits.detach()
        grad = cross_entropy_bwd(logits, target, lse, dloss, **ctx.options)
        return grad, None, None, None, None


def cross_entropy_loss(
    logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    logit_softcapping: float | None = None,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Cross entropy of each row.

    Args:
        logits: ``[N, V]``; with ``process_group`` this rank's equal share of the classes.
        target: ``[N]``, int64 or int32, class ids over all ranks, or ``ignore_index``.
        label_smoothing: mass spread evenly over all classes.
        logit_scale: factor on the logits.
        lse_square_scale: weight of the z-loss ``lse ** 2``.
        logit_softcapping: cap `c` of ``c * tanh(logits / c)``, applied after the scale.
        ignore_index: target of rows that cost nothing.
        inplace_backward: the backward pass overwrites ``logits`` with their gradient.
        process_group: ranks that share the classes.

    Returns:
        ``loss`` and ``z_loss`` ``[N]``, float32. The z-loss is part of the loss and carries no gradient of its own.

    Raises:
        ArgumentError: shapes or dtypes that do not fit, or (on the CPU) a target that is not a class.
    """
    check_target(logits, target, _shard(logits, process_group).total, ignore_index)
    options = {
        "label_smoothing": label_smoothing,
        "logit_scale": logit_scale,
        "lse_square_scale": lse_square_scale,
        "logit_softcapping": logit_softcapping,
        "ignore_index": ignore_index,
    }
    return _CrossEntropy.apply(logits, target, options, inplace_backward, process_group)
