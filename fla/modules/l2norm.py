# SPDX-License-Identifier: MIT
"""Another path of :mod:`fla.modules.norm.l2norm`."""

import sys

import fla.modules.norm.l2norm as _target

sys.modules[__name__] = _target
