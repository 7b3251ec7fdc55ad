# SPDX-License-Identifier: MIT
"""Another path of :mod:`fla.modules.norm.layernorm_gated`."""

import sys

import fla.modules.norm.layernorm_gated as _target

sys.modules[__name__] = _target
