# SPDX-License-Identifier: MIT
"""GDN-2: a delta rule with a decay and an erase gate per key channel and a write gate per value channel."""

from fla.ops.gdn2.chunk import chunk_gdn2
from fla.ops.gdn2.fused_recurrent import fused_recurrent_gdn2
from fla.ops.gdn2.naive import naive_chunk_gdn2, naive_recurrent_gdn2

__all__ = ["chunk_gdn2", "fused_recurrent_gdn2", "naive_chunk_gdn2", "naive_recurrent_gdn2"]
