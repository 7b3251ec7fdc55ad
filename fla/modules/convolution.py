# SPDX-License-Identifier: MIT
"""Another path of the convolutions' modules, kept for existing imports."""

from fla.modules.causal_conv1d import (
    CausalConv1dFunction,
    ShortConvolution,
    causal_conv1d,
    causal_conv1d_bwd,
    causal_conv1d_fwd,
    causal_conv1d_update,
    causal_conv1d_update_states,
)
from fla.modules.causal_conv1d.backends.cuda import causal_conv1d_cuda, fast_causal_conv1d_fn
from fla.modules.causal_conv1d.cp import CausalConv1dFunctionCP, causal_conv1d_cp
from fla.modules.long_conv import ImplicitLongConvolution, LongConvolution, PositionalEmbedding, fft_conv

__all__ = [
    "CausalConv1dFunction",
    "CausalConv1dFunctionCP",
    "ImplicitLongConvolution",
    "LongConvolution",
    "PositionalEmbedding",
    "ShortConvolution",
    "causal_conv1d",
    "causal_conv1d_bwd",
    "causal_conv1d_cp",
    "causal_conv1d_cuda",
    "causal_conv1d_fwd",
    "causal_conv1d_update",
    "causal_conv1d_update_states",
    "fast_causal_conv1d_fn",
    "fft_conv",
]
