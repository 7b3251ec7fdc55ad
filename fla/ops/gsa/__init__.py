# SPDX-License-Identifier: MIT
"""Gated slot attention: a bounded number of memory slots per head, written by a gate and read by softmax."""

from fla.ops.gsa.chunk import chunk_gsa
from fla.ops.gsa.fused_recurrent import fused_recurrent_gsa

__all__ = ["chunk_gsa", "fused_recurrent_gsa"]
