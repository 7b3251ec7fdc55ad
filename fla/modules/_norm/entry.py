# SPDX-License-Identifier: MIT
"""Triton paths of the norms: the parameters of the public functions, arguments checked there.

`fla.modules._norm.covers` says which calls may come here.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fla.modules._norm.autograd import _c, norm, norm_linear
from fla.modules._norm.engine import (
    L2,
    LAYER,
    NO_GATE,
    RMS,
    SIGMOID,
    SWISH,
    SWISH_FIRST,
    NormCall,
    norm_backward,
    norm_forward,
)
from fla.ops._common.launch import on_device

_GATES = {"swish": SWISH, "silu": SWISH, "sigmoid": SIGMOID}


@functools.lru_cache(maxsize=256)
def _call(is_rms_norm: bool, gate: int, groups: int, eps: float) -> NormCall:
    return NormCall(RMS if is_rms_norm else LAYER, gate, groups, float(eps))


@functools.lru_cache(maxsize=64)
def _l2_call(eps: float, out_dtype: torch.dtype | None) -> NormCall:
    return NormCall(L2, eps=float(eps), out_dtype=out_dtype)


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None, eps: float = 1e-5,
    prenorm: bool = False, residual_in_fp32: bool = False, is_rms_norm: bool = False,
) -> Any:  # fmt: skip
    return norm(x, weight, bias, residual, None, _call(is_rms_norm, NO_GATE, 1, eps), prenorm, residual_in_fp32)


def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None, eps: float = 1e-5,
    prenorm: bool = False, residual_in_fp32: bool = False, is_rms_norm: bool = False, num_groups: int = 1,
) -> Any:  # fmt: skip
    call = _call(is_rms_norm, NO_GATE, num_groups, eps)
    return norm(x, weight, bias, residual, None, call, prenorm, residual_in_fp32)


def rms_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None, eps: float = 1e-5,
    prenorm: bool = False, residual_in_fp32: bool = False,
) -> Any:  # fmt: skip
    return norm(x, weight, bias, residual, None, _call(True, NO_GATE, 1, eps), prenorm, residual_in_fp32)


def layer_norm_linear(
    x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, linear_weight: Tensor,
    linear_bias: Tensor | None, residual: Tensor | None = None, eps: float = 1e-5, prenorm: bool = False,
    residual_in_fp32: bool = False, is_rms_norm: bool = False, num_groups: int = 1,
) -> Any:  # fmt: skip
    call = _call(is_rms_norm, NO_GATE, num_groups, eps)
    return norm_linear(
        x, norm_weight, norm_bias, residual, None, linear_weight, linear_bias, call, prenorm, residual_in_fp32
    )


def layer_norm_gated(
    x: Tensor, g: Tensor, weight: Tensor | None, bias: Tensor | None, activation: str = "swish",
    residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False, eps: float = 1e-6,
) -> Any:  # fmt: skip
    call = _call(False, _GATES[activation], 1, eps)
    return norm(x, weight, bias, residual, g, call, prenorm, residual_in_fp32)


def rms_norm_gated(
    x: Tensor, g: Tensor, weight: Tensor | None, bias: Tensor | None, activation: str = "swish",
    residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False, eps: float = 1e-6,
) -> Any:  # fmt: skip
    call = _call(True, _GATES[activation], 1, eps)
    return norm(x, weight, bias, residual, g, call, prenorm, residual_in_fp32)


def layer_norm_swish_gate_linear(
    x: Tensor, g: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, linear_weight: Tensor,
    linear_bias: Tensor | None, residual: Tensor | None = None, prenorm: bool = False,
    residual_in_fp32: bool = False, eps: float = 1e-6,
) -> Any:  # fmt: skip
    call = _call(False, SWISH, 1, eps)
    return norm_linear(
        x, norm_weight, norm_bias, residual, g, linear_weight, linear_bias, call, prenorm, residual_in_fp32
    )


def rms_norm_swish_gate_linear(
    x: Tensor, g: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, linear_weight: Tensor,
    linear_bias: Tensor | None, residual: Tensor | None = None, prenorm: bool = False,
    residual_in_fp32: bool = False, eps: float = 1e-6,
) -> Any:  # fmt: skip
    call = _call(True, SWISH, 1, eps)
    return norm_linear(
        x, norm_weight, norm_bias, residual, g, linear_weight, linear_bias, call, prenorm, residual_in_fp32
    )


def layernorm_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor | None = None, eps: float = 1e-6,
    group_size: int | None = None, norm_before_gate: bool = True, is_rms_norm: bool = False,
) -> Any:  # fmt: skip
    groups = 1 if group_size is None else x.shape[-1] // group_size
    gate = NO_GATE if z is None else SWISH if norm_before_gate else SWISH_FIRST
    return norm(x, weight, bias, None, z, _call(is_rms_norm, gate, groups, eps))


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    return norm(x, None, None, None, None, _l2_call(eps, output_dtype))


_KINDS = {"layer": LAYER, "rms": RMS, "l2": L2}


def norm_pass(
    x: Tensor, g: Tensor | None, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    kind: str = "layer", activation: str = "swish", eps: float = 1e-5, num_groups: int = 1,
    out_dtype: torch.dtype | None = None, stream_dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    call = NormCall(_KINDS[kind], NO_GATE if g is None else _GATES[activation], num_groups, float(eps), out_dtype)
    x, g, residual, weight, bias = x.contiguous(), _c(g), _c(residual), _c(weight), _c(bias)
    with on_device(x):
        return norm_forward(call, x, weight, bias, residual, g, stream_dtype, True)


def norm_pass_back(
    s: Tensor, dy: Tensor, ds: Tensor | None, g: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    mean: Tensor | None, rstd: Tensor, kind: str = "layer", activation: str = "swish", num_groups: int = 1,
    x_dtype: torch.dtype | None = None, res_dtype: torch.dtype | None = None, again: bool = False,
    normalised: bool = False,
) -> Any:  # fmt: skip
    call = NormCall(_KINDS[kind], NO_GATE if g is None else _GATES[activation], num_groups)
    s, dy, ds, g, weight, bias = s.contiguous(), dy.contiguous(), _c(ds), _c(g), _c(weight), _c(bias)
    with on_device(s):
        return norm_backward(
            call, dy, ds, s, weight, bias, g, x_dtype or s.dtype, res_dtype, again=again, mean=_c(mean),
            rstd=rstd.contiguous(), normalised=normalised,
        )  # fmt: skip
