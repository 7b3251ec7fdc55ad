# SPDX-License-Identifier: MIT
"""Layer, RMS and group norm, with a residual stream, and the linear layer that often follows.

All three are one function: rows of `D` channels split into `G` groups, each centred (unless RMS) and scaled by
``1 / sqrt(variance + eps)``. With a residual, ``s = x + residual`` is normalised, and ``prenorm=True`` returns `s` too.
That residual stream has the residual's dtype when there is one, else float32 with ``residual_in_fp32``, else the dtype
of `x`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fla.backends import dispatch
from fla.modules._checks import check_beside
from fla.modules._dtype import accumulation_dtype, autocast_dtype, parameter_dtype, upcast
from fla.modules._facts import ROWS
from fla.modules._norm.covers import covers_groups, covers_linear, covers_norm
from fla.modules.norm.functions import LayerNormFunction, LayerNormLinearFunction, layer_norm_bwd, layer_norm_fwd
from fla.modules.norm.reference import group_norm_ref, layer_norm_ref, rms_norm_ref
from fla.ops._common.checks import ArgumentError

__all__ = [
    "GroupNorm",
    "GroupNormLinear",
    "GroupNormRef",
    "LayerNorm",
    "LayerNormFunction",
    "LayerNormLinear",
    "LayerNormLinearFunction",
    "RMSNorm",
    "RMSNormLinear",
    "group_norm",
    "group_norm_linear",
    "group_norm_ref",
    "layer_norm",
    "layer_norm_bwd",
    "layer_norm_fwd",
    "layer_norm_linear",
    "layer_norm_ref",
    "rms_norm",
    "rms_norm_linear",
    "rms_norm_ref",
]

NormOutput = Tensor | tuple[Tensor, Tensor]


def check_rows(x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> None:
    """Check the arguments that every norm has."""
    if x.dim() == 0:
        raise ArgumentError("`x` must have at least one axis, got a scalar.")
    D = x.shape[-1]
    for name, p in (("weight", weight), ("bias", bias)):
        if p is not None and p.numel() != D:
            raise ArgumentError(f"`{name}` must have {D} elements, one for each channel of `x`, got {list(p.shape)}.")
    if residual is not None and residual.shape != x.shape:
        raise ArgumentError(f"`residual` must have the shape of `x`, {list(x.shape)}, got {list(residual.shape)}.")
    check_beside(x, weight=weight, bias=bias, residual=residual)


def _check_groups(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, num_groups: int
) -> None:
    check_rows(x, weight, bias, residual)
    if num_groups < 1 or x.shape[-1] % num_groups:
        raise ArgumentError(f"`num_groups` must divide the {x.shape[-1]} channels of `x`, got {num_groups}.")


def normalize(
    s: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, is_rms_norm: bool, num_groups: int = 1
) -> Tensor:
    """The norm of ``s`` ``[..., D]``, which is in its accumulation dtype already; the result is too."""
    D = s.shape[-1]
    weight = None if weight is None else weight.to(s.dtype)
    bias = None if bias is None else bias.to(s.dtype)
    if num_groups == 1:
        if not is_rms_norm:
            return F.layer_norm(s, (D,), weight, bias, eps)
        y = F.rms_norm(s, (D,), weight, eps)
        return y if bias is None else y + bias
    y = normalize(s.unflatten(-1, (num_groups, D // num_groups)), None, None, eps, is_rms_norm).flatten(-2)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def add_residual(x: Tensor, residual: Tensor | None, residual_in_fp32: bool) -> tuple[Tensor, Tensor]:
    """``x + residual`` unrounded in the accumulation dtype, and rounded to the dtype of the residual stream."""
    if residual is not None:
        s = upcast(x) + upcast(residual)
        return s, s.to(residual.dtype)
    return upcast(x), x.to(accumulation_dtype(x.dtype)) if residual_in_fp32 else x


def _norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    prenorm: bool,
    residual_in_fp32: bool,
    is_rms_norm: bool,
    num_groups: int = 1,
) -> NormOutput:
    s, stream = add_residual(x, residual, residual_in_fp32)
    y = normalize(s, weight, bias, eps, is_rms_norm, num_groups).to(x.dtype)
    return (y, stream) if prenorm else y


@dispatch(
    "modules",
    facts=ROWS,
    validate=check_rows,
    triton="fla.modules._norm.entry:layer_norm",
    triton_verifier=covers_norm,
)
def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> NormOutput:
    """Layer norm over the last axis.

    Args:
        x: ``[..., D]``.
        weight, bias: ``[D]`` or None.
        residual: ``[..., D]``, added to ``x`` first.
        eps: added to the variance.
        prenorm: return ``(y, residual stream)``.
        residual_in_fp32: keep the residual stream in float32 when no residual is given.
        is_rms_norm: do not subtract the mean.

    Raises:
        ArgumentError: shapes that do not fit.
    """
    return _norm(x, weight, bias, residual, eps, prenorm, residual_in_fp32, is_rms_norm)


@dispatch(
    "modules",
    facts=ROWS,
    validate=_check_groups,
    triton="fla.modules._norm.entry:group_norm",
    triton_verifier=covers_groups,
)
def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> NormOutput:
    """:func:`layer_norm` of each of ``num_groups`` equal blocks of channels; ``weight`` and ``bias`` are ``[D]``."""
    return _norm(x, weight, bias, residual, eps, prenorm, residual_in_fp32, is_rms_norm, num_groups)


@dispatch(
    "modules",
    facts=ROWS,
    validate=check_rows,
    triton="fla.modules._norm.entry:rms_norm",
    triton_verifier=covers_norm,
)
def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> NormOutput:
    """RMS norm over the last axis (https://arxiv.org/abs/1910.07467); arguments as for :func:`layer_norm`."""
    return _norm(x, weight, bias, residual, eps, prenorm, residual_in_fp32, True)


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Check the parameters of a linear layer that takes ``x``."""
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ArgumentError(f"`linear_weight` must have shape [O, {x.shape[-1]}], got {list(weight.shape)}.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ArgumentError(f"`linear_bias` must have shape [{weight.shape[0]}], got {list(bias.shape)}.")
    check_beside(x, linear_weight=weight, linear_bias=bias)


def linear_of(y: NormOutput, weight: Tensor, bias: Tensor | None) -> NormOutput:
    """``F.linear`` of a norm's output in autocast's dtype, the residual stream passed through."""
    h = y[0] if isinstance(y, tuple) else y
    dtype = autocast_dtype(h)
    out = F.linear(h.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    return (out, y[1]) if isinstance(y, tuple) else out


def _check_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None,
    num_groups: int,
) -> None:
    _check_groups(x, norm_weight, norm_bias, residual, num_groups)
    check_linear(x, linear_weight, linear_bias)


@dispatch(
    "modules",
    facts=ROWS,
    validate=_check_linear,
    triton="fla.modules._norm.entry:layer_norm_linear",
    triton_verifier=covers_linear,
)
def layer_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> NormOutput:
    """A norm as in :func:`group_norm`, followed by ``F.linear`` with ``linear_weight`` ``[O, D]``."""
    y = group_norm(x, norm_weight, norm_bias, residual, eps, prenorm, residual_in_fp32, is_rms_norm, num_groups)
    return linear_of(y, linear_weight, linear_bias)


group_norm_linear = layer_norm_linear


def rms_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> NormOutput:
    """RMS norm followed by ``F.linear`` with ``linear_weight`` ``[O, D]``."""
    return layer_norm_linear(
        x, norm_weight, norm_bias, linear_weight, linear_bias, residual, eps, prenorm, residual_in_fp32, True
    )


class NormBase(nn.Module):
    """Parameters and attributes of every norm: ``weight`` of ones, ``bias`` of zeros, or None."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.elementwise_affine = elementwise_affine
        self.eps = eps
        kind = parameter_dtype(dtype)
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        if elementwise_affine:
            self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=kind))
            if bias:
                self.bias = nn.Parameter(torch.empty(hidden_size, device=device, dtype=kind))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to one and the bias to zero."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class LayerNorm(NormBase):
    """Layer norm over the last axis of ``[..., hidden_size]``; parameters are float32 unless ``dtype`` is given."""

    is_rms_norm = False
    num_groups = 1

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> NormOutput:
        """The norm of ``x + residual``; with ``prenorm``, ``(norm, x + residual)``."""
        if self.num_groups > 1:
            return group_norm(
                x,
                self.weight,
                self.bias,
                residual,
                self.eps,
                prenorm,
                residual_in_fp32,
                self.is_rms_norm,
                self.num_groups,
            )
        if self.is_rms_norm:
            return rms_norm(x, self.weight, self.bias, residual, self.eps, prenorm, residual_in_fp32)
        return layer_norm(x, self.weight, self.bias, residual, self.eps, prenorm, residual_in_fp32)


class RMSNorm(LayerNorm):
    """RMS norm over the last axis of ``[..., hidden_size]``; parameters are float32 unless ``dtype`` is given."""

    is_rms_norm = True


class GroupNorm(LayerNorm):
    """Layer or RMS norm of each of ``num_groups`` blocks of channels of ``[..., hidden_size]``."""

    def __init__(
        self,
        num_groups: int,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        eps: float = 1e-5,
        is_rms_norm: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if num_groups < 1 or hidden_size % num_groups:
            raise ArgumentError(f"`num_groups` must divide hidden_size = {hidden_size}, got {num_groups}.")
        super().__init__(hidden_size, elementwise_affine, bias, eps, device, dtype)
        self.num_groups = num_groups
        self.is_rms_norm = is_rms_norm


class _LinearForward(LayerNorm):
    """``forward`` of the norms that are followed by a linear layer whose parameters the caller passes."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> NormOutput:
        """``F.linear(norm(x + residual), weight, bias)``; with ``prenorm``, the residual stream too."""
        return layer_norm_linear(
            x,
            self.weight,
            self.bias,
            weight,
            bias,
            residual,
            self.eps,
            prenorm,
            residual_in_fp32,
            self.is_rms_norm,
            self.num_groups,
        )


class LayerNormLinear(_LinearForward, LayerNorm):
    """:class:`LayerNorm` followed by a linear layer whose parameters are passed to ``forward``."""


class RMSNormLinear(_LinearForward, RMSNorm):
    """:class:`RMSNorm` followed by a linear layer whose parameters are passed to ``forward``."""


class GroupNormLinear(_LinearForward, GroupNorm):
    """:class:`GroupNorm` followed by a linear layer whose parameters are passed to ``forward``."""


class GroupNormRef(NormBase):
    """:class:`GroupNorm` by :func:`group_norm_ref`. For tests."""

    def __init__(
        self,
        num_groups: int,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        eps: float = 1e-5,
        is_rms_norm: bool = False,
    ) -> None:
        super().__init__(hidden_size, elementwise_affine, bias, eps)
        self.num_groups = num_groups
        self.is_rms_norm = is_rms_norm

    def forward(self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False) -> NormOutput:
        """The norm in float32."""
        return group_norm_ref(
            x, self.weight, self.bias, self.num_groups, residual, self.eps, self.is_rms_norm, prenorm, upcast=True
        )


def __getattr__(name: str) -> Any:
    # Plans import torch.distributed.tensor, which nobody else should wait for.
    if name == "NormParallel":
        from fla.modules.parallel import NormParallel

        return NormParallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
