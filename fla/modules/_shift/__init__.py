# SPDX-License-Identifier: MIT
"""The Triton path of `fla.modules.token_shift`."""
