# SPDX-License-Identifier: MIT
"""The elementwise engine: one forward and one backward Triton kernel behind every activation of `fla.modules`."""
