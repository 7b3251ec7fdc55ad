# SPDX-License-Identifier: MIT
"""Token mixers. Importing this package imports no layer before it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fla._lazy import lazy

_HOME = {
    "Attention": "attn",
    "Comba": "comba",
    "DeltaNet": "delta_net",
    "GatedDeltaNet": "gated_deltanet",
    "GatedDeltaNet2": "gdn2",
    "GatedLinearAttention": "gla",
    "GatedSlotAttention": "gsa",
    "HGRN2Attention": "hgrn2",
    "HGRNAttention": "hgrn",
    "KimiDeltaAttention": "kda",
    "LinearAttention": "linear_attn",
    "Mamba": "mamba",
    "Mamba2": "mamba2",
    "MultiScaleRetention": "multiscale_retention",
    "RWKV6Attention": "rwkv6",
}

__all__ = list(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from fla.layers.attn import Attention as Attention
    from fla.layers.comba import Comba as Comba
    from fla.layers.delta_net import DeltaNet as DeltaNet
    from fla.layers.gated_deltanet import GatedDeltaNet as GatedDeltaNet
    from fla.layers.gdn2 import GatedDeltaNet2 as GatedDeltaNet2
    from fla.layers.gla import GatedLinearAttention as GatedLinearAttention
    from fla.layers.gsa import GatedSlotAttention as GatedSlotAttention
    from fla.layers.hgrn import HGRNAttention as HGRNAttention
    from fla.layers.hgrn2 import HGRN2Attention as HGRN2Attention
    from fla.layers.kda import KimiDeltaAttention as KimiDeltaAttention
    from fla.layers.linear_attn import LinearAttention as LinearAttention
    from fla.layers.mamba import Mamba as Mamba
    from fla.layers.mamba2 import Mamba2 as Mamba2
    from fla.layers.multiscale_retention import MultiScaleRetention as MultiScaleRetention
    from fla.layers.rwkv6 import RWKV6Attention as RWKV6Attention

__getattr__, __dir__ = lazy(__name__, _HOME)
