# SPDX-License-Identifier: MIT
"""Lightning attention: linear attention with a fixed decay per head and layer."""

from fla.ops.lightning_attn.chunk import chunk_lightning_attn
from fla.ops.lightning_attn.fused_recurrent import fused_recurrent_lightning_attn

__all__ = ["chunk_lightning_attn", "fused_recurrent_lightning_attn"]
