# SPDX-License-Identifier: MIT
"""Another path of :mod:`fla.modules.causal_conv1d` and :mod:`fla.modules.long_conv`, kept for existing imports."""

from fla.modules.causal_conv1d import (
    ShortConvolution,
    causal_conv1d,
    causal_conv1d_update,
    causal_conv1d_update_states,
)
from fla.modules.long_conv import ImplicitLongConvolution, LongConvolution, PositionalEmbedding, fft_conv

__all__ = [
    "ImplicitLongConvolution",
    "LongConvolution",
    "PositionalEmbedding",
    "ShortConvolution",
    "causal_conv1d",
    "causal_conv1d_update",
    "causal_conv1d_update_states",
    "fft_conv",
]
