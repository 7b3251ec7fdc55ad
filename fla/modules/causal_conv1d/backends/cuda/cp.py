# SPDX-License-Identifier: MIT
"""Another path of :mod:`fla.modules.causal_conv1d.cp`."""

from fla.modules.causal_conv1d.cp import CausalConv1dFunctionCP, causal_conv1d_cp

__all__ = ["CausalConv1dFunctionCP", "causal_conv1d_cp"]
