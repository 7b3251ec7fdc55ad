# SPDX-License-Identifier: MIT
"""HGRN: an elementwise recurrence with a gate per channel."""

from fla.ops.hgrn.chunk import chunk_hgrn
from fla.ops.hgrn.fused_recurrent import fused_recurrent_hgrn

__all__ = ["chunk_hgrn", "fused_recurrent_hgrn"]
