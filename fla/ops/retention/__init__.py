# SPDX-License-Identifier: MIT
"""Retention: linear attention with a fixed decay per head."""

from fla.ops.retention.chunk import chunk_retention
from fla.ops.retention.fused_chunk import fused_chunk_retention
from fla.ops.retention.fused_recurrent import fused_recurrent_retention
from fla.ops.retention.parallel import parallel_retention

__all__ = ["chunk_retention", "fused_chunk_retention", "fused_recurrent_retention", "parallel_retention"]
