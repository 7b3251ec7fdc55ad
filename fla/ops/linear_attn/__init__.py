# SPDX-License-Identifier: MIT
"""Linear attention without decay, optionally divided by the sum of its weights."""

from fla.ops.linear_attn.chunk import chunk_linear_attn
from fla.ops.linear_attn.fused_chunk import fused_chunk_linear_attn
from fla.ops.linear_attn.fused_recurrent import fused_recurrent_linear_attn

__all__ = ["chunk_linear_attn", "fused_chunk_linear_attn", "fused_recurrent_linear_attn"]
