# SPDX-License-Identifier: MIT
"""Norms: plain, gated, gated by groups, and L2."""

from typing import Any

from fla.modules.norm.fused_norm_gate import (
    FusedLayerNormGated,
    FusedLayerNormGatedLinear,
    FusedLayerNormSwishGate,
    FusedLayerNormSwishGateLinear,
    FusedRMSNormGated,
    FusedRMSNormGatedLinear,
    FusedRMSNormSwishGate,
    FusedRMSNormSwishGateLinear,
)
from fla.modules.norm.l2norm import L2Norm
from fla.modules.norm.layernorm import GroupNorm, GroupNormLinear, LayerNorm, LayerNormLinear, RMSNorm, RMSNormLinear
from fla.modules.norm.layernorm_gated import LayerNormGated, RMSNormGated

__all__ = [
    "FusedLayerNormGated",
    "FusedLayerNormGatedLinear",
    "FusedLayerNormSwishGate",
    "FusedLayerNormSwishGateLinear",
    "FusedRMSNormGated",
    "FusedRMSNormGatedLinear",
    "FusedRMSNormSwishGate",
    "FusedRMSNormSwishGateLinear",
    "GroupNorm",
    "GroupNormLinear",
    "L2Norm",
    "LayerNorm",
    "LayerNormGated",
    "LayerNormLinear",
    "NormParallel",
    "RMSNorm",
    "RMSNormGated",
    "RMSNormLinear",
]


def __getattr__(name: str) -> Any:
    # Plans import torch.distributed.tensor, which nobody else should wait for.
    if name == "NormParallel":
        from fla.modules.parallel import NormParallel

        return NormParallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
