# SPDX-License-Identifier: MIT
"""Triton paths of the activations: the parameters of the public functions, arguments checked there."""

from __future__ import annotations

import torch
from torch import Tensor

from fla.modules._pointwise.engine import (
    ELU_P1,
    GELU,
    LOGSIGMOID,
    POWER,
    SIGMOID,
    SQRELU,
    SWISH,
    pointwise,
    pointwise_linear,
)


def sigmoid(x: Tensor) -> Tensor:
    return pointwise(SIGMOID, x)


def logsigmoid(x: Tensor, temperature: float = 1.0, output_dtype: torch.dtype | None = None) -> Tensor:
    return pointwise(LOGSIGMOID, x, None, temperature, output_dtype)


def swish(x: Tensor) -> Tensor:
    return pointwise(SWISH, x)


def elu_p1(x: Tensor) -> Tensor:
    return pointwise(ELU_P1, x)


def sqrelu(x: Tensor) -> Tensor:
    return pointwise(SQRELU, x)


def fast_gelu_impl(x: Tensor) -> Tensor:
    return pointwise(GELU, x)


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    return pointwise(SWISH, x, y)


def sigmoidglu(x: Tensor, y: Tensor) -> Tensor:
    return pointwise(SIGMOID, x, y)


def powglu(x: Tensor, y: Tensor, power: float = 3.0) -> Tensor:
    return pointwise(POWER, x, y, power)


def swiglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return pointwise_linear(SWISH, x, y, weight, bias)


def sigmoidglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return pointwise_linear(SIGMOID, x, y, weight, bias)


def powglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, power: float = 3.0) -> Tensor:
    return pointwise_linear(POWER, x, y, weight, bias, power)
