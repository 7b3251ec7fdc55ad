# SPDX-License-Identifier: MIT
"""RWKV-6: linear attention with a decay per key channel that reads the state before each token, and a bonus."""

from fla.ops.rwkv6.chunk import chunk_rwkv6
from fla.ops.rwkv6.fused_recurrent import fused_recurrent_rwkv6

__all__ = ["chunk_rwkv6", "fused_recurrent_rwkv6"]
