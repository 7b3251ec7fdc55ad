# SPDX-License-Identifier: MIT
"""Norms: plain, gated, gated by groups, and L2."""

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
    "RMSNorm",
    "RMSNormGated",
    "RMSNormLinear",
]
