# SPDX-License-Identifier: MIT
"""Pointwise activations and their gated (two-input) forms."""

from fla.modules.activations import ops
from fla.modules.activations.ops import *  # noqa: F403

__all__ = ops.__all__
