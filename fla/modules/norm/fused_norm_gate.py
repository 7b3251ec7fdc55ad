# SPDX-License-Identifier: MIT
"""Layer and RMS norm followed by an output gate: ``norm(x + residual) * act(g)``."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fla.backends import dispatch
from fla.modules._checks import check_beside
from fla.modules._dtype import upcast
from fla.modules._facts import ROWS
from fla.modules._norm.covers import covers_gated, covers_gated_linear
from fla.modules.norm.functions import (
    LayerNormGatedFunction,
    LayerNormGatedLinearFunction,
    layer_norm_gated_bwd,
    layer_norm_gated_fwd,
)
from fla.modules.norm.layernorm import (
    NormBase,
    NormOutput,
    add_residual,
    check_linear,
    check_rows,
    linear_of,
    normalize,
)
from fla.ops._common.checks import ArgumentError, check_choice

__all__ = [
    "FusedLayerNormGated",
    "FusedLayerNormGatedLinear",
    "FusedLayerNormSwishGate",
    "FusedLayerNormSwishGateLinear",
    "FusedRMSNormGated",
    "FusedRMSNormGatedLinear",
    "FusedRMSNormSwishGate",
    "FusedRMSNormSwishGateLinear",
    "LayerNormGatedFunction",
    "LayerNormGatedLinearFunction",
    "layer_norm_gated",
    "layer_norm_gated_bwd",
    "layer_norm_gated_fwd",
    "layer_norm_swish_gate_linear",
    "rms_norm_gated",
    "rms_norm_swish_gate_linear",
]

_GATES: dict[str, Callable[[Tensor], Tensor]] = {"swish": F.silu, "silu": F.silu, "sigmoid": torch.sigmoid}


def _check_gated(
    x: Tensor, g: Tensor, weight: Tensor | None, bias: Tensor | None, activation: str, residual: Tensor | None
) -> None:
    check_choice("activation", activation, _GATES)
    check_rows(x, weight, bias, residual)
    if g.shape != x.shape:
        raise ArgumentError(f"`g` must have the shape of `x`, {list(x.shape)}, got {list(g.shape)}.")
    check_beside(x, g=g)


def _gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    prenorm: bool,
    residual_in_fp32: bool,
    eps: float,
    is_rms_norm: bool,
) -> NormOutput:
    s, stream = add_residual(x, residual, residual_in_fp32)
    y = (normalize(s, weight, bias, eps, is_rms_norm) * _GATES[activation](upcast(g))).to(x.dtype)
    return (y, stream) if prenorm else y


@dispatch(
    "modules",
    facts=ROWS,
    validate=_check_gated,
    triton="fla.modules._norm.entry:layer_norm_gated",
    triton_verifier=covers_gated,
)
def layer_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> NormOutput:
    """``layer_norm(x + residual) * act(g)``.

    Args:
        x, g: ``[..., D]``.
        weight, bias: ``[D]`` or None, applied before the gate.
        activation: ``"swish"`` (= ``"silu"``, ``g * sigmoid(g)``) or ``"sigmoid"``.
        residual, prenorm, residual_in_fp32, eps: as for :func:`fla.modules.norm.layernorm.layer_norm`.

    Raises:
        ArgumentError: another activation, or shapes that do not fit.
    """
    return _gated(x, g, weight, bias, activation, residual, prenorm, residual_in_fp32, eps, False)


@dispatch(
    "modules",
    facts=ROWS,
    validate=_check_gated,
    triton="fla.modules._norm.entry:rms_norm_gated",
    triton_verifier=covers_gated,
)
def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> NormOutput:
    """``rms_norm(x + residual) * act(g)``; arguments as for :func:`layer_norm_gated`."""
    return _gated(x, g, weight, bias, activation, residual, prenorm, residual_in_fp32, eps, True)


def _check_gated_linear(
    x: Tensor,
    g: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None,
) -> None:
    _check_gated(x, g, norm_weight, norm_bias, "swish", residual)
    check_linear(x, linear_weight, linear_bias)


@dispatch(
    "modules",
    facts=ROWS,
    validate=_check_gated_linear,
    triton="fla.modules._norm.entry:layer_norm_swish_gate_linear",
    triton_verifier=covers_gated_linear,
)
def layer_norm_swish_gate_linear(
    x: Tensor,
    g: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> NormOutput:
    """:func:`layer_norm_gated` with swish, followed by ``F.linear`` with ``linear_weight`` ``[O, D]``."""
    y = _gated(x, g, norm_weight, norm_bias, "swish", residual, prenorm, residual_in_fp32, eps, False)
    return linear_of(y, linear_weight, linear_bias)


@dispatch(
    "modules",
    facts=ROWS,
    validate=_check_gated_linear,
    triton="fla.modules._norm.entry:rms_norm_swish_gate_linear",
    triton_verifier=covers_gated_linear,
)
def rms_norm_swish_gate_linear(
    x: Tensor,
    g: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> NormOutput:
    """:func:`rms_norm_gated` with swish, followed by ``F.linear`` with ``linear_weight`` ``[O, D]``."""
    y = _gated(x, g, norm_weight, norm_bias, "swish", residual, prenorm, residual_in_fp32, eps, True)
    return linear_of(y, linear_weight, linear_bias)


class FusedLayerNormGated(NormBase):
    """``layer_norm(x) * act(g)`` on ``[..., hidden_size]``; ``activation`` is swish (= silu) or sigmoid."""

    _function = staticmethod(layer_norm_gated)

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        activation: str = "swish",
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_choice("activation", activation, _GATES)
        super().__init__(hidden_size, elementwise_affine, bias, eps, device, dtype)
        self.activation = activation

    def forward(
        self,
        x: Tensor,
        g: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> NormOutput:
        """``norm(x + residual) * act(g)``; with ``prenorm``, the residual stream too."""
        return self._function(
            x, g, self.weight, self.bias, self.activation, residual, prenorm, residual_in_fp32, self.eps
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation!r}"


class FusedRMSNormGated(FusedLayerNormGated):
    """``rms_norm(x) * act(g)`` on ``[..., hidden_size]``; ``activation`` is swish (= silu) or sigmoid."""

    _function = staticmethod(rms_norm_gated)

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, elementwise_affine, False, activation, eps, device, dtype)


class FusedLayerNormSwishGate(FusedLayerNormGated):
    """:class:`FusedLayerNormGated` with a swish gate."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, elementwise_affine, bias, "swish", eps, device, dtype)


class FusedRMSNormSwishGate(FusedRMSNormGated):
    """:class:`FusedRMSNormGated` with a swish gate."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, elementwise_affine, eps, "swish", device, dtype)


class FusedLayerNormGatedLinear(NormBase):
    """``F.linear(layer_norm(x) * swish(g), weight, bias)``; the linear parameters are passed to ``forward``."""

    _function = staticmethod(layer_norm_swish_gate_linear)

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, elementwise_affine, False, eps, device, dtype)

    def forward(
        self,
        x: Tensor,
        g: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> NormOutput:
        """``weight`` ``[O, hidden_size]`` is required, ``bias`` ``[O]`` is not."""
        if weight is None:
            raise ArgumentError("`weight` of the linear layer must be given, got None.")
        return self._function(x, g, self.weight, self.bias, weight, bias, residual, prenorm, residual_in_fp32, self.eps)


class FusedRMSNormGatedLinear(FusedLayerNormGatedLinear):
    """``F.linear(rms_norm(x) * swish(g), weight, bias)``; the linear parameters are passed to ``forward``."""

    _function = staticmethod(rms_norm_swish_gate_linear)


class FusedLayerNormSwishGateLinear(FusedLayerNormGatedLinear):
    """Another name of :class:`FusedLayerNormGatedLinear`, whose gate is swish as well."""


class FusedRMSNormSwishGateLinear(FusedRMSNormGatedLinear):
    """Another name of :class:`FusedRMSNormGatedLinear`, whose gate is swish as well."""
