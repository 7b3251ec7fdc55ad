# SPDX-License-Identifier: MIT
"""Another path of :mod:`fla.modules.norm.layernorm`."""

import sys

import fla.modules.norm.layernorm as _target

sys.modules[__name__] = _target
