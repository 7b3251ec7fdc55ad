# SPDX-License-Identifier: MIT
"""Cross entropy over materialised logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fla.modules.fused_cross_entropy.ops import (
    CrossEntropyLossFunction,
    FusedCrossEntropyFunction,
    cross_entropy_bwd,
    cross_entropy_fwd,
    cross_entropy_loss,
    fused_cross_entropy_forward,
)

__all__ = [
    "CrossEntropyLossFunction",
    "FusedCrossEntropyFunction",
    "FusedCrossEntropyLoss",
    "cross_entropy_bwd",
    "cross_entropy_fwd",
    "cross_entropy_loss",
    "fused_cross_entropy_forward",
]


class FusedCrossEntropyLoss(nn.Module):
    """:func:`cross_entropy_loss` with a reduction; arguments as there.

    Args:
        reduction: ``"mean"`` over rows that are not ignored (NaN when all are, as ``torch.nn.CrossEntropyLoss``),
            ``"sum"`` or ``"none"``.
        return_z_loss: return ``(loss, z_loss)``, both reduced.

    Raises:
        NotImplementedError: another reduction.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        logit_softcapping: float | None = None,
        inplace_backward: bool = False,
        process_group: Any = None,
        return_z_loss: bool = False,
    ) -> None:
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise NotImplementedError(f"`reduction` must be 'mean', 'sum' or 'none', got {reduction!r}.")
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.logit_scale = logit_scale
        self.lse_square_scale = lse_square_scale
        self.logit_softcapping = logit_softcapping
        self.inplace_backward = inplace_backward
        self.process_group = process_group
        self.return_z_loss = return_z_loss

    def forward(self, input: Tensor, target: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """``input`` ``[N, V]``, ``target`` ``[N]``."""
        loss, z_loss = cross_entropy_loss(
            input,
            target,
            self.label_smoothing,
            self.logit_scale,
            self.lse_square_scale,
            self.logit_softcapping,
            self.ignore_index,
            self.inplace_backward,
            self.process_group,
        )
        if self.reduction == "none":
            return (loss, z_loss) if self.return_z_loss else loss
        total = (target != self.ignore_index).sum() if self.reduction == "mean" else None
        loss = loss.sum() if total is None else loss.sum() / total
        if not self.return_z_loss:
            return loss
        return loss, z_loss.sum() if total is None else z_loss.sum() / total
