# SPDX-License-Identifier: MIT
"""fla: linear attention for PyTorch, with every op open to separately installed backends."""

__version__ = "1.0.0.dev0"
