# SPDX-License-Identifier: MIT
"""The norm engine: one forward and one backward Triton kernel behind every norm of `fla.modules`."""
