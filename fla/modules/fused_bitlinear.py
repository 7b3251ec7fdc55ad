# SPDX-License-Identifier: MIT
"""Linear layers of BitNet b1.58 (https://arxiv.org/abs/2402.17764): RMS norm, 8-bit inputs, ternary weights."""

from __future__ import annotations

from torch import Tensor, nn

from fla.modules.norm.layernorm import RMSNorm
from fla.modules.norm.layernorm_quant import (
    LayerNormLinearQuantFunction,
    activation_quant,
    layer_norm_linear_quant,
    layer_norm_quant_bwd,
    layer_norm_quant_fwd,
    rms_norm_linear_quant,
    weight_quant,
)

__all__ = [
    "BitLinear",
    "FusedBitLinear",
    "LayerNormLinearQuantFn",
    "activation_quant",
    "bit_linear",
    "layer_norm_bwd",
    "layer_norm_fwd_quant",
    "layer_norm_linear_quant",
    "layer_norm_linear_quant_fn",
    "rms_norm_linear_quant",
    "weight_quant",
]

# The names of earlier releases.
layer_norm_fwd_quant = layer_norm_quant_fwd
layer_norm_bwd = layer_norm_quant_bwd
LayerNormLinearQuantFn = LayerNormLinearQuantFunction
layer_norm_linear_quant_fn = layer_norm_linear_quant


def bit_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-8,
) -> Tensor:
    """``F.linear(activation_quant(rms_norm(x)), weight_quant(weight), bias)``.

    Args:
        x: ``[..., D]``.
        weight: ``[O, D]``.
        bias: ``[O]``.
        norm_weight, norm_bias: ``[D]``.
        eps: added to the mean square.

    Raises:
        ArgumentError: shapes, dtypes or devices that do not fit.
    """
    y = rms_norm_linear_quant(x, norm_weight, norm_bias, weight, bias, eps=eps)
    assert isinstance(y, Tensor)
    return y


class BitLinear(nn.Linear):
    """:func:`bit_linear` with parameters ``weight``, ``bias`` (added, where there is one) and ``norm.weight``.

    The parameters stay full precision; they are quantised in every forward pass. The norm's are float32.

    Args:
        in_features: `D`.
        out_features: `O`.
        bias: add a bias.
        norm_eps: added to the mean square.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False, norm_eps: float = 1e-8) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.norm = RMSNorm(in_features, eps=norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features] -> [..., out_features]``."""
        return bit_linear(x, self.weight, self.bias, self.norm.weight, self.norm.bias, self.norm.eps)


class FusedBitLinear(BitLinear):
    """:class:`BitLinear` with ``norm_eps = 1e-8``; one implementation serves both."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)
