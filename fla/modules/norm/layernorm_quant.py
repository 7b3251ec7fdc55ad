# SPDX-License-Identifier: MIT
"""A norm and a linear layer with 8-bit inputs and ternary weights, as BitNet b1.58 (https://arxiv.org/abs/2402.17764).

Both are rounded in value and kept in floating point. Gradients pass the rounding as if it were the identity.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fla.backends import dispatch
from fla.modules._dtype import upcast
from fla.modules._facts import ROWS
from fla.modules.norm.functions import layer_norm_bwd, layer_norm_fwd
from fla.modules.norm.layernorm import NormOutput, add_residual, check_rows, linear_of, normalize
from fla.ops._common.checks import ArgumentError, check_floating, check_same_device

__all__ = [
    "LayerNormLinearQuantFunction",
    "activation_quant",
    "layer_norm_linear_quant",
    "layer_norm_quant_bwd",
    "layer_norm_quant_fwd",
    "rms_norm_linear_quant",
    "weight_quant",
]


def weight_quant(w: Tensor) -> Tensor:
    """``clamp(round(w * a), -1, 1) / a`` with ``a = 1 / max(mean|w|, 1e-5)`` over the whole tensor; dtype of ``w``.

    Halves are rounded to even.
    """
    u = upcast(w)
    if u.numel() == 0:
        return w.clone()
    step = u.abs().mean().clamp(min=1e-5)
    return ((u / step).round().clamp(-1, 1) * step).to(w.dtype)


def activation_quant(x: Tensor) -> Tensor:
    """``clamp(round(x * c), -128, 127) / c`` with ``c = 127 / max(max|row|, 1e-5)``; dtype of ``x``.

    Halves are rounded to even.

    Args:
        x: ``[..., D]``.
    """
    u = upcast(x)
    if u.numel() == 0:
        return x.clone()
    c = 127 / u.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    return ((u * c).round().clamp(-128, 127) / c).to(x.dtype)


class _Through(torch.autograd.Function):
    """The quantised tensor forward, the gradient unchanged backward (straight-through estimator)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, is_weight: bool) -> Tensor:
        return weight_quant(x) if is_weight else activation_quant(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


def _check(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None,
) -> None:
    tensors = {
        "x": x,
        "norm_weight": norm_weight,
        "norm_bias": norm_bias,
        "linear_weight": linear_weight,
        "linear_bias": linear_bias,
        "residual": residual,
    }
    check_floating(**tensors)
    check_same_device(**tensors)
    check_rows(x, norm_weight, norm_bias, residual)
    if linear_weight.dim() != 2 or linear_weight.shape[1] != x.shape[-1]:
        raise ArgumentError(
            f"`linear_weight` must have shape [O, D] with D = {x.shape[-1]}, got {list(linear_weight.shape)}."
        )
    if linear_bias is not None and linear_bias.shape != linear_weight.shape[:1]:
        raise ArgumentError(f"`linear_bias` must have shape [{linear_weight.shape[0]}], got {list(linear_bias.shape)}.")


@dispatch("modules", facts=ROWS, validate=_check)
def layer_norm_linear_quant(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> NormOutput:
    """``F.linear(activation_quant(norm(x + residual)), weight_quant(linear_weight), linear_bias)``.

    Args:
        x: ``[..., D]``.
        norm_weight, norm_bias: ``[D]`` or None.
        linear_weight: ``[O, D]``.
        linear_bias: ``[O]`` or None.
        residual: ``[..., D]``, added to ``x`` first.
        eps: added to the variance.
        prenorm: return ``(y, residual stream)``.
        residual_in_fp32: keep the residual stream in float32 when no residual is given.
        is_rms_norm: do not subtract the mean.

    Raises:
        ArgumentError: shapes, dtypes or devices that do not fit.
    """
    s, stream = add_residual(x, residual, residual_in_fp32)
    y = _Through.apply(normalize(s, norm_weight, norm_bias, eps, is_rms_norm), False).to(x.dtype)
    # The whole product in the dtype of the rows (or autocast's), as in the norms that are not quantised.
    return linear_of((y, stream) if prenorm else y, _Through.apply(linear_weight, True), linear_bias)


def rms_norm_linear_quant(
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
    """:func:`layer_norm_linear_quant` without centring."""
    return layer_norm_linear_quant(
        x, norm_weight, norm_bias, linear_weight, linear_bias, residual, eps, prenorm, residual_in_fp32, True
    )


def layer_norm_quant_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    is_rms_norm: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """:func:`fla.modules.norm.functions.layer_norm_fwd` whose ``y`` is quantised by :func:`activation_quant`."""
    y, mean, rstd, stream = layer_norm_fwd(x, weight, bias, eps, residual, out_dtype, residual_dtype, is_rms_norm)
    return activation_quant(y), mean, rstd, stream


def layer_norm_quant_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    dresidual: Tensor | None = None,
    has_residual: bool = False,
    is_rms_norm: bool = False,
    x_dtype: torch.dtype | None = None,
    recompute_output: bool = False,
) -> tuple[Any, ...]:
    """Backward of :func:`layer_norm_quant_fwd`, with the rounding as the identity.

    ``(dx, dweight, dbias, dresidual)`` and, with ``recompute_output``, the quantised ``y``; arguments as for
    :func:`fla.modules.norm.functions.layer_norm_bwd`.
    """
    found = layer_norm_bwd(
        dy, x, weight, bias, mean, rstd, dresidual, has_residual, is_rms_norm, x_dtype, recompute_output
    )
    return (*found[:4], activation_quant(found[4])) if recompute_output else found


class LayerNormLinearQuantFunction:
    """``apply`` takes the arguments of :func:`layer_norm_linear_quant` in order."""

    apply = staticmethod(layer_norm_linear_quant)
