# SPDX-License-Identifier: MIT
"""Another path of :mod:`fla.modules.causal_conv1d`, kept for existing imports."""

from fla.modules.causal_conv1d import (
    ShortConvolution,
    causal_conv1d,
    causal_conv1d_update,
    causal_conv1d_update_states,
)

__all__ = ["ShortConvolution", "causal_conv1d", "causal_conv1d_update", "causal_conv1d_update_states"]
