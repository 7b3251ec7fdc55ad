# SPDX-License-Identifier: MIT
"""Gradient checkpointing of blocks, for transformers older than 4.53, which has no class for it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

__all__ = ["GradientCheckpointingLayer"]


class GradientCheckpointingLayer(nn.Module):
    """A block whose activations ``gradient_checkpointing_enable`` recomputes in the backward pass."""

    gradient_checkpointing = False
    _gradient_checkpointing_func: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block, under ``_gradient_checkpointing_func`` while training with checkpointing on."""
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            return self._gradient_checkpointing_func(partial(super().__call__, **kwargs), *args)
        return super().__call__(*args, **kwargs)
