# SPDX-License-Identifier: MIT
"""The loss of a language model: shifted labels, one of three criteria, the token count of a trainer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fla.modules.fused_cross_entropy import FusedCrossEntropyLoss
from fla.modules.fused_linear_cross_entropy import FusedLinearCrossEntropyLoss
from fla.modules.l2warp import l2_warp

__all__ = ["language_model_loss", "shift"]


def shift(labels: Tensor, ignore_index: int) -> Tensor:
    """``labels`` moved one position to the left, the last one ignored, so that the length stays."""
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], ignore_index)], 1)


def _summing(criterion: nn.Module) -> nn.Module:
    """``criterion`` with reduction "sum"; the caller's object is left alone."""
    if getattr(criterion, "reduction", None) == "sum":
        return criterion
    if not hasattr(criterion, "reduction"):
        raise ValueError(
            f"`num_items_in_batch` needs a criterion with a `reduction`, which {type(criterion).__name__} has not."
        )
    criterion = copy.copy(criterion)
    criterion.reduction = "sum"  # type: ignore[assignment]
    return criterion


def language_model_loss(
    hidden_states: Tensor,
    logits: Tensor | None,
    head: nn.Linear,
    *,
    labels: Tensor | None,
    shift_labels: Tensor | None,
    criterion: nn.Module | None,
    fused: bool,
    use_l2warp: bool,
    num_items_in_batch: int | Tensor | None,
) -> Tensor:
    """Mean loss of the next token.

    Args:
        hidden_states: ``[B, T, D]``, used when ``logits`` ``[B, T, V]`` is None.
        head: the language model head.
        labels: ``[B, T]``, shifted here; or ``shift_labels``, shifted already.
        criterion: the caller's loss; otherwise the linear one without logits, the fused one if ``fused``, or torch's.
        use_l2warp: penalise large logits through the gradient.
        num_items_in_batch: divide the sum of the losses by this.
    """
    reduction = "mean" if num_items_in_batch is None else "sum"
    ignore_index = -100
    loss_of: Callable[..., Any]
    if criterion is not None:
        ignore_index = getattr(criterion, "ignore_index", ignore_index)
        loss_of = criterion if num_items_in_batch is None else _summing(criterion)
    elif logits is None:
        loss_of = FusedLinearCrossEntropyLoss(use_l2warp=use_l2warp, reduction=reduction)
    elif fused:
        loss_of = FusedCrossEntropyLoss(inplace_backward=True, reduction=reduction)
    else:
        loss_of = cast(Callable[..., Any], partial(F.cross_entropy, reduction=reduction))
    if shift_labels is None:
        assert labels is not None
        shift_labels = shift(labels.to(hidden_states.device), ignore_index)
    targets = shift_labels.to(hidden_states.device)
    if targets.shape != hidden_states.shape[:-1]:
        name = "shift_labels" if labels is None else "labels"
        raise ValueError(
            f"`{name}` must have the shape of the inputs, {list(hidden_states.shape[:-1])}, got {list(targets.shape)}."
        )
    if logits is None:
        loss = loss_of(hidden_states, targets, head.weight, head.bias)
    else:
        loss = loss_of(logits.flatten(0, -2), targets.flatten())
        if use_l2warp:
            loss = l2_warp(loss, logits)
    if num_items_in_batch is not None:
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        loss = loss / num_items_in_batch
    return loss
