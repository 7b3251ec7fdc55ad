# SPDX-License-Identifier: MIT
"""Cross entropy of a linear layer without the whole logits in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fla.modules.fused_linear_cross_entropy.ops import (
    fused_linear_cross_entropy_backward,
    fused_linear_cross_entropy_bwd,
    fused_linear_cross_entropy_forward,
    fused_linear_cross_entropy_fwd,
    fused_linear_cross_entropy_loss,
    logsumexp_fwd,
)
from fla.ops._common.checks import check_choice

if TYPE_CHECKING:
    from fla.modules.parallel import LinearLossParallel as LinearLossParallel

__all__ = [
    "FusedLinearCrossEntropyLoss",
    "LinearLossParallel",
    "fused_linear_cross_entropy_backward",
    "fused_linear_cross_entropy_bwd",
    "fused_linear_cross_entropy_forward",
    "fused_linear_cross_entropy_fwd",
    "fused_linear_cross_entropy_loss",
    "logsumexp_fwd",
]


class FusedLinearCrossEntropyLoss(nn.Module):
    """:func:`fused_linear_cross_entropy_loss` as a module; arguments as there."""

    def __init__(
        self,
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
    ) -> None:
        super().__init__()
        check_choice("reduction", reduction, ("mean", "sum"))
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.logit_scale = logit_scale
        self.logit_softcapping = logit_softcapping
        self.num_chunks = num_chunks
        self.reduction = reduction
        self.use_l2warp = use_l2warp
        self.l2_penalty_factor = l2_penalty_factor
        self.accumulate_grad_in_fp32 = accumulate_grad_in_fp32
        self.process_group = process_group

    def forward(self, x: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x`` ``[..., H]`` and ``target`` ``[...]`` are flattened; ``weight`` ``[V, H]``, ``bias`` ``[V]``."""
        return fused_linear_cross_entropy_loss(
            x.reshape(-1, x.shape[-1]),
            target.reshape(-1),
            weight,
            bias,
            self.ignore_index,
            self.label_smoothing,
            self.logit_scale,
            self.logit_softcapping,
            self.num_chunks,
            self.reduction,
            self.use_l2warp,
            self.l2_penalty_factor,
            self.accumulate_grad_in_fp32,
            self.process_group,
        )


def __getattr__(name: str) -> Any:
    # torch.distributed.tensor takes a while to import, and losses need none of it.
    if name == "LinearLossParallel":
        from fla.modules.parallel import LinearLossParallel

        return LinearLossParallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
