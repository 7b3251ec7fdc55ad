# SPDX-License-Identifier: MIT
"""KL divergence between the outputs of two linear layers without the whole logits in memory."""

from __future__ import annotations

from torch import Tensor, nn

from fla.modules.fused_kl_div.ops import (
    fused_kl_div_backward,
    fused_kl_div_bwd,
    fused_kl_div_forward,
    fused_kl_div_fwd,
    fused_kl_div_loss,
)
from fla.ops._common.checks import check_choice

__all__ = [
    "FusedKLDivLoss",
    "fused_kl_div_backward",
    "fused_kl_div_bwd",
    "fused_kl_div_forward",
    "fused_kl_div_fwd",
    "fused_kl_div_loss",
]


class FusedKLDivLoss(nn.Module):
    """:func:`fused_kl_div_loss` as a module; ``reduction`` must be ``"batchmean"``."""

    def __init__(self, reduction: str = "batchmean", accumulate_grad_in_fp32: bool = True) -> None:
        super().__init__()
        check_choice("reduction", reduction, ("batchmean",))
        self.reduction = reduction
        self.accumulate_grad_in_fp32 = accumulate_grad_in_fp32

    def forward(self, x: Tensor, target_x: Tensor, weight: Tensor, target_weight: Tensor) -> Tensor:
        """``x`` ``[N, H]``, ``target_x`` ``[N, H']``, ``weight`` ``[V, H]``, ``target_weight`` ``[V, H']``."""
        return fused_kl_div_loss(x, target_x, weight, target_weight, self.reduction, self.accumulate_grad_in_fp32)
