# SPDX-License-Identifier: MIT
"""TileLang kernels for fla's gated delta rules. Installing the package is all there is to do; see `plugin.py`."""

__version__ = "0.1.0.dev0"
