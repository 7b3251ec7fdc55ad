# SPDX-License-Identifier: MIT
"""Cross entropy of rows of logits in PyTorch, for any device and dtype; formulas in :mod:`.fused_cross_entropy.ops`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fla.modules._dtype import upcast

__all__ = ["Shard", "add_warp", "chunk_", "cross_entropy_bwd", "cross_entropy_fwd", "divergence_", "join", "shard"]


def _transform(logits: Tensor, scale: float, cap: float | None) -> Tensor:
    z = upcast(logits)
    if scale != 1.0:
        z = z * scale
    return z if cap is None else cap * torch.tanh(z / cap)


class Shard(NamedTuple):
    """The classes ``[start, start + V)`` of ``total`` that this rank holds."""

    total: int
    start: int


def shard(logits: Tensor, process_group: Any) -> Shard:
    V = logits.shape[-1]
    if process_group is None:
        return Shard(V, 0)
    return Shard(V * dist.get_world_size(process_group), V * dist.get_rank(process_group))


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
    total, start = shard(logits, process_group)
    z = _transform(logits, logit_scale, logit_softcapping)
    lse = torch.logsumexp(z, -1)
    column, mine = _local(target, start, V)
    # -inf logits stand for forbidden classes; 0 * -inf must not make the row NaN.
    picked = z.gather(1, column).masked_fill(~mine, 0.0).squeeze(1)
    reward = picked if label_smoothing == 0.0 else (1 - label_smoothing) * picked + label_smoothing / total * z.sum(-1)
    loss, z_loss, lse = join(lse, reward, target, lse_square_scale, ignore_index, process_group)
    return loss, z_loss, lse, total, start


def join(
    lse: Tensor, reward: Tensor, target: Tensor, lse_square_scale: float, ignore_index: int, process_group: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """``loss``, ``z_loss`` and ``lse`` of rows from every rank's part of ``lse`` and of what is taken off it."""
    if process_group is not None:
        parts = [torch.empty_like(lse) for _ in range(dist.get_world_size(process_group))]
        dist.all_gather(parts, lse.contiguous(), group=process_group)
        lse = torch.logsumexp(torch.stack(parts), 0)
        reward = reward.contiguous()
        dist.all_reduce(reward, group=process_group)
    ignored = target == ignore_index
    z_loss = (lse_square_scale * lse.square()).masked_fill(ignored, 0.0)
    return (lse - reward).masked_fill(ignored, 0.0) + z_loss, z_loss, lse


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


def add_warp(grad: Tensor, peak: tuple[Tensor, Tensor], factor: float, process_group: Any) -> None:
    """Add ``factor * max(logits)`` to the gradient of the largest logit of each row; ``peak`` is value and column."""
    value, column = peak
    value = upcast(value)
    if process_group is not None:
        every = [torch.empty_like(value) for _ in range(dist.get_world_size(process_group))]
        dist.all_gather(every, value, group=process_group)
        # Of equal maxima the first rank's counts, as the first column does within a rank.
        winner = torch.stack(every).argmax(0) == dist.get_rank(process_group)
        value = value * winner
    grad.scatter_add_(1, column[:, None], (value * factor).to(grad.dtype)[:, None])


def chunk_(
    logits: Tensor,
    target: Tensor,
    options: dict[str, Any],
    each: Tensor | None,
    warp: float | None,
    process_group: Any,
) -> Tensor:
    """Losses of the rows of a chunk; with ``each``, the gradient of every row's loss, logits become their gradients."""
    losses, _, lse, total, first = cross_entropy_fwd(logits, target, **options, process_group=process_group)
    if each is not None:
        peak = None if warp is None else logits.max(-1)
        cross_entropy_bwd(
            logits, target, lse, each, **options, total_classes=total, class_start_idx=first, inplace_backward=True
        )
        if peak is not None and warp is not None:
            add_warp(logits, (peak[0], peak[1]), warp, process_group)
    return losses


def divergence_(student: Tensor, teacher: Tensor, scale: float, need_grad: bool) -> Tensor:
    """``KL(teacher || student)`` of every row; ``need_grad`` writes ``scale`` times its gradient over ``student``."""
    s, t = torch.log_softmax(upcast(student), -1), torch.log_softmax(upcast(teacher), -1)
    wide = torch.promote_types(s.dtype, t.dtype)
    p = t.to(wide).exp()
    # A class that the teacher rules out (logit -inf) adds nothing, whatever the student says of it.
    losses = (p * (t - s)).masked_fill(p == 0, 0.0).sum(-1)
    if need_grad:
        student.copy_(s.to(wide).exp_().sub_(p).mul_(scale))
    return losses
