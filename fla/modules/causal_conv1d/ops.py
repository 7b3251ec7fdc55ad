# SPDX-License-Identifier: MIT
"""The short convolution's functions in one place, as the reference package has them."""

from fla.modules.causal_conv1d.conv import causal_conv1d, causal_conv1d_update, causal_conv1d_update_states
from fla.modules.causal_conv1d.low import CausalConv1dFunction, causal_conv1d_bwd, causal_conv1d_fwd
from fla.modules.causal_conv1d.short_conv import ShortConvolution

__all__ = [
    "CausalConv1dFunction",
    "ShortConvolution",
    "causal_conv1d",
    "causal_conv1d_bwd",
    "causal_conv1d_fwd",
    "causal_conv1d_update",
    "causal_conv1d_update_states",
]
