# SPDX-License-Identifier: MIT
"""The position of a decoding step as tensors, so that one CUDA graph serves every position."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["StaticPosition"]


class StaticPosition(NamedTuple):
    """Where the new token of each sequence stands. Layers find it as ``static_position`` in their keywords."""

    column: Tensor  # [1] tokens before it, padding included
    offsets: Tensor  # [B] tokens before it, without padding
    valid: Tensor | None  # [B, limit] which tokens are no padding
    limit: int  # positions there may be

    def slots(self, size: int) -> tuple[Tensor, Tensor]:
        """Where a ring of ``size`` entries keeps the new token ``[1]``, and which entries it sees ``[B, size]``."""
        entry = torch.arange(size, device=self.column.device)
        position = self.column - (self.column - entry) % size  # what an entry holds, negative for nothing yet
        seen = (position >= 0).expand(len(self.offsets), size)
        if self.valid is not None:
            seen = seen & self.valid[:, position.clamp(min=0)]
        return self.column % size, seen
