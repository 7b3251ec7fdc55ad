# SPDX-License-Identifier: MIT
"""Short causal convolution."""

from fla.modules.causal_conv1d.ops import causal_conv1d, causal_conv1d_update, causal_conv1d_update_states
from fla.modules.causal_conv1d.short_conv import ShortConvolution

__all__ = ["ShortConvolution", "causal_conv1d", "causal_conv1d_update", "causal_conv1d_update_states"]
