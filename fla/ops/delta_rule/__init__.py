# SPDX-License-Identifier: MIT
"""Delta rule: linear attention that overwrites what a key already holds."""

from fla.ops.delta_rule.chunk import chunk_delta_rule
from fla.ops.delta_rule.fused_chunk import fused_chunk_delta_rule
from fla.ops.delta_rule.fused_recurrent import fused_recurrent_delta_rule

__all__ = ["chunk_delta_rule", "fused_chunk_delta_rule", "fused_recurrent_delta_rule"]
