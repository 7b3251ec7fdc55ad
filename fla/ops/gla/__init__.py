# SPDX-License-Identifier: MIT
"""Linear attention with a data-dependent decay per key channel."""

from fla.ops.gla.chunk import chunk_gla
from fla.ops.gla.fused_chunk import fused_chunk_gla
from fla.ops.gla.fused_recurrent import fused_recurrent_gla

__all__ = ["chunk_gla", "fused_chunk_gla", "fused_recurrent_gla"]
