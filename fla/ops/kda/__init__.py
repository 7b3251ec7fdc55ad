# SPDX-License-Identifier: MIT
"""Kimi Delta Attention: a delta rule whose state decays per key channel."""

from fla.ops.kda.chunk import chunk_kda
from fla.ops.kda.fused_recurrent import fused_recurrent_kda

__all__ = ["chunk_kda", "fused_recurrent_kda"]
