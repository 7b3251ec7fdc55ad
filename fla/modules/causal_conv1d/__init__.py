# SPDX-License-Identifier: MIT
"""Short causal convolution."""

from fla.modules.causal_conv1d.ops import (
    CausalConv1dFunction,
    ShortConvolution,
    causal_conv1d,
    causal_conv1d_bwd,
    causal_conv1d_fwd,
    causal_conv1d_update,
    causal_conv1d_update_states,
)

__all__ = [
    "CausalConv1dFunction",
    "ShortConvolution",
    "causal_conv1d",
    "causal_conv1d_bwd",
    "causal_conv1d_fwd",
    "causal_conv1d_update",
    "causal_conv1d_update_states",
]
