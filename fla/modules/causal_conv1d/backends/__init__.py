# SPDX-License-Identifier: MIT
"""Paths of the reference package; the adapter itself is :mod:`fla.modules.causal_conv1d.library`."""
