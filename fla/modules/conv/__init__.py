# SPDX-License-Identifier: MIT
"""Another path of :mod:`fla.modules.causal_conv1d` and :mod:`fla.modules.long_conv`, kept for existing imports.

As in the reference package, the attribute ``conv.causal_conv1d`` is the function while importing the path
``fla.modules.conv.causal_conv1d`` finds a module.
"""

import sys
from types import ModuleType

from fla.modules.causal_conv1d import cp as _cp
from fla.modules.causal_conv1d import ops as _ops
from fla.modules.causal_conv1d import short_conv as _short_conv
from fla.modules.causal_conv1d.backends import cuda as _cuda
from fla.modules.convolution import (
    CausalConv1dFunction,
    ImplicitLongConvolution,
    LongConvolution,
    PositionalEmbedding,
    ShortConvolution,
    causal_conv1d,
    causal_conv1d_bwd,
    causal_conv1d_fwd,
    causal_conv1d_update,
    causal_conv1d_update_states,
    fft_conv,
)

__all__ = [
    "CausalConv1dFunction",
    "ImplicitLongConvolution",
    "LongConvolution",
    "PositionalEmbedding",
    "ShortConvolution",
    "causal_conv1d",
    "causal_conv1d_bwd",
    "causal_conv1d_fwd",
    "causal_conv1d_update",
    "causal_conv1d_update_states",
    "fft_conv",
]


triton = ModuleType(f"{__name__}.triton", "Another path of fla.modules.causal_conv1d.ops.")
triton.__dict__.update({name: getattr(_ops, name) for name in _ops.__all__}, ops=_ops, kernels=_ops, __path__=[])

for _path in ("causal_conv1d", "triton.ops", "triton.kernels"):
    sys.modules[f"{__name__}.{_path}"] = _ops
sys.modules[f"{__name__}.short_conv"] = _short_conv
sys.modules[f"{__name__}.triton"] = triton
long_conv = sys.modules[f"{__name__}.long_conv"] = sys.modules["fla.modules.long_conv"]
cp = sys.modules[f"{__name__}.cp"] = sys.modules[f"{__name__}.cp.ops"] = _cp
cuda = sys.modules[f"{__name__}.cuda"] = _cuda
sys.modules[f"{__name__}.cuda.ops"] = sys.modules["fla.modules.causal_conv1d.backends.cuda.ops"]
