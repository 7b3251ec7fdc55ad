# SPDX-License-Identifier: MIT
"""Another path of :mod:`fla.modules.causal_conv1d` and :mod:`fla.modules.long_conv`, kept for existing imports.

As in the reference package, the attribute ``conv.causal_conv1d`` is the function while importing the path
``fla.modules.conv.causal_conv1d`` finds a module.
"""

import sys
from types import ModuleType

from fla.modules.causal_conv1d import cp as _cp
from fla.modules.causal_conv1d import ops as _ops
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


def _path(name: str, module: ModuleType, **more: ModuleType) -> ModuleType:
    """A package of ``module``'s names, importable as ``name`` under this one."""
    made = ModuleType(f"{__name__}.{name}", f"Another path of {module.__name__}.")
    made.__dict__.update({n: getattr(module, n) for n in module.__all__}, **more, __all__=module.__all__, __path__=[])
    sys.modules[made.__name__] = made
    sys.modules.update({f"{made.__name__}.{n}": m for n, m in more.items()})
    return made


triton = _path("triton", _ops, ops=_ops, kernels=_ops)
cp = _path("cp", _cp, ops=_cp)
cuda = sys.modules[f"{__name__}.cuda"] = _cuda
sys.modules[f"{__name__}.cuda.ops"] = sys.modules["fla.modules.causal_conv1d.backends.cuda.ops"]
long_conv = sys.modules[f"{__name__}.long_conv"] = sys.modules["fla.modules.long_conv"]
short_conv = sys.modules[f"{__name__}.short_conv"] = sys.modules[f"{__name__}.causal_conv1d"] = _ops
