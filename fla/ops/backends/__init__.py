# SPDX-License-Identifier: MIT
"""The plugin framework under the import path of the 0.6.0 series; see :mod:`fla.backends`."""

from fla.backends import *  # noqa: F403
from fla.backends import __all__ as __all__
