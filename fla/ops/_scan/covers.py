# SPDX-License-Identifier: MIT
"""Which calls the Triton scan covers. Needs no triton; the rest of a call runs in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from fla.ops._common.covers import Answer


def covers_scan(x: Tensor, g: Tensor, initial_state: Tensor | None) -> Answer:
    """Verifier: ``(True, None)``, or False and the reason."""
    if torch.float64 in (x.dtype, g.dtype) or (initial_state is not None and initial_state.dtype == torch.float64):
        return False, "the Triton scan computes in float32, float64 runs in PyTorch"
    return True, None
