# SPDX-License-Identifier: MIT
"""Loss of group relative policy optimisation (https://arxiv.org/abs/2402.03300, section 4.1)."""

from fla.modules.grpo.ops import fused_grpo_loss, grpo_loss_torch, grpo_loss_with_old_logps

__all__ = ["fused_grpo_loss", "grpo_loss_torch", "grpo_loss_with_old_logps"]
