# SPDX-License-Identifier: MIT
"""Building blocks of layers and models. Importing this package imports torch, and no block before it is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "BitLinear": "fused_bitlinear",
    "FusedBitLinear": "fused_bitlinear",
    "FusedCrossEntropyLoss": "fused_cross_entropy",
    "FusedKLDivLoss": "fused_kl_div",
    "FusedLayerNormGated": "norm",
    "FusedLayerNormSwishGate": "norm",
    "FusedLayerNormSwishGateLinear": "norm",
    "FusedLinearCrossEntropyLoss": "fused_linear_cross_entropy",
    "FusedRMSNormGated": "norm",
    "FusedRMSNormSwishGate": "norm",
    "FusedRMSNormSwishGateLinear": "norm",
    "GatedMLP": "mlp",
    "GroupNorm": "norm",
    "GroupNormLinear": "norm",
    "ImplicitLongConvolution": "long_conv",
    "L2Norm": "norm",
    "LayerNorm": "norm",
    "LayerNormLinear": "norm",
    "LongConvolution": "long_conv",
    "RMSNorm": "norm",
    "RMSNormLinear": "norm",
    "RotaryEmbedding": "rotary",
    "ShortConvolution": "causal_conv1d",
    "TokenShift": "token_shift",
}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from fla.modules.causal_conv1d import ShortConvolution as ShortConvolution
    from fla.modules.fused_bitlinear import BitLinear as BitLinear
    from fla.modules.fused_bitlinear import FusedBitLinear as FusedBitLinear
    from fla.modules.fused_cross_entropy import FusedCrossEntropyLoss as FusedCrossEntropyLoss
    from fla.modules.fused_kl_div import FusedKLDivLoss as FusedKLDivLoss
    from fla.modules.fused_linear_cross_entropy import FusedLinearCrossEntropyLoss as FusedLinearCrossEntropyLoss
    from fla.modules.long_conv import ImplicitLongConvolution as ImplicitLongConvolution
    from fla.modules.long_conv import LongConvolution as LongConvolution
    from fla.modules.mlp import GatedMLP as GatedMLP
    from fla.modules.norm import *  # noqa: F403
    from fla.modules.rotary import RotaryEmbedding as RotaryEmbedding
    from fla.modules.token_shift import TokenShift as TokenShift


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    elif name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    else:
        try:
            value = importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
