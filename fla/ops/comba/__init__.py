# SPDX-License-Identifier: MIT
"""Comba: a gated delta rule that reads with a key of its own, before the state decays."""

from fla.ops.comba.chunk import chunk_comba
from fla.ops.comba.fused_recurrent import fused_recurrent_comba
from fla.ops.comba.naive import naive_chunk_comba, naive_recurrent_comba

__all__ = ["chunk_comba", "fused_recurrent_comba", "naive_chunk_comba", "naive_recurrent_comba"]
