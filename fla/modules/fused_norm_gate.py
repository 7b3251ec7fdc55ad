# SPDX-License-Identifier: MIT
"""Another path of :mod:`fla.modules.norm.fused_norm_gate`."""

import sys

import fla.modules.norm.fused_norm_gate as _target

sys.modules[__name__] = _target
