# SPDX-License-Identifier: MIT
"""fla's Triton kernels on Ascend NPUs. Installing the package is all there is to do; see `plugin.py`."""

__version__ = "0.1.0.dev0"
