# SPDX-License-Identifier: MIT
"""The short convolution by the package causal-conv1d, under the reference package's names."""

from fla.modules.causal_conv1d.backends.cuda.ops import causal_conv1d_cuda, fast_causal_conv1d_fn

__all__ = ["causal_conv1d_cuda", "fast_causal_conv1d_fn"]
