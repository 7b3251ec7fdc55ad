# SPDX-License-Identifier: MIT
"""FlashKDA as a backend of fla's `chunk_kda`. Installing the package is all there is to do; see `plugin.py`."""

__version__ = "0.1.0.dev0"
