# SPDX-License-Identifier: MIT
"""Values and gradients of the activations by themselves, for callers with an autograd function of their own.

``*_fwd`` take no part in autograd; ``*_bwd`` and ``*_fwdbwd`` take the inputs and the gradient of the result. Results
are contiguous whatever ``output_contiguous`` says. The classes hold ``apply`` under the reference package's names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fla.modules.activations.pointwise import (
    bias_gelu_impl,
    elu_p1,
    fast_gelu_impl,
    logsigmoid,
    powglu,
    powglu_linear,
    sigmoid,
    sigmoidglu,
    sigmoidglu_linear,
    sqrelu,
    swiglu,
    swiglu_linear,
    swish,
)


def _value(fn: Callable[..., Tensor], *args: Any) -> Tensor:
    with torch.no_grad():
        return fn(*args)


def _gradients(
    fn: Callable[..., Tensor], inputs: tuple[Tensor, ...], g: Tensor, *more: Any, value: bool = False
) -> tuple[Tensor, ...]:
    """Gradients of ``inputs``, and with ``value`` what ``fn`` returned."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = fn(*leaves, *more)
    found = torch.autograd.grad(out, leaves, g)
    return (*found, out.detach()) if value else found


def sigmoid_fwd(x: Tensor, output_contiguous: bool = False) -> Tensor:
    """`sigmoid`."""
    return _value(sigmoid, x)


def sigmoid_bwd(x: Tensor, dy: Tensor, output_contiguous: bool = False) -> Tensor:
    """Gradient of ``x`` in `sigmoid`."""
    return _gradients(sigmoid, (x,), dy)[0]


def swish_fwd(x: Tensor, output_contiguous: bool = False) -> Tensor:
    """`swish`."""
    return _value(swish, x)


def swish_bwd(x: Tensor, dy: Tensor, output_contiguous: bool = False) -> Tensor:
    """Gradient of ``x`` in `swish`."""
    return _gradients(swish, (x,), dy)[0]


def logsigmoid_fwd(x: Tensor, temperature: float = 1.0, output_contiguous: bool = False) -> Tensor:
    """`logsigmoid`."""
    return _value(logsigmoid, x, temperature)


def logsigmoid_bwd(x: Tensor, dy: Tensor, temperature: float = 1.0, output_contiguous: bool = False) -> Tensor:
    """Gradient of ``x`` in `logsigmoid`."""
    return _gradients(logsigmoid, (x,), dy, temperature)[0]


def elu_p1_fwd(x: Tensor) -> Tensor:
    """`elu_p1`."""
    return _value(elu_p1, x)


def elu_p1_bwd(x: Tensor, dy: Tensor) -> Tensor:
    """Gradient of ``x`` in `elu_p1`."""
    return _gradients(elu_p1, (x,), dy)[0]


def gelu_fwd(x: Tensor) -> Tensor:
    """`fast_gelu_impl`."""
    return _value(fast_gelu_impl, x)


def gelu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """Gradient of ``x`` in `fast_gelu_impl`."""
    return _gradients(fast_gelu_impl, (x,), g)[0]


def bias_gelu(y: Tensor, bias: Tensor) -> Tensor:
    """`bias_gelu_impl`."""
    return _value(bias_gelu_impl, y, bias)


def bias_gelu_bwd(g: Tensor, y: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``y`` and, summed over rows, of ``bias`` in `bias_gelu_impl`."""
    dy, dbias = _gradients(bias_gelu_impl, (y, bias), g)
    return dy, dbias


def relu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """Gradient of ``x`` in ``relu``."""
    return _gradients(F.relu, (x,), g)[0]


def sqrelu_fwd(x: Tensor) -> Tensor:
    """`sqrelu`."""
    return _value(sqrelu, x)


def sqrelu_bwd(g: Tensor, x: Tensor) -> Tensor:
    """Gradient of ``x`` in `sqrelu`."""
    return _gradients(sqrelu, (x,), g)[0]


def swiglu_fwd(x: Tensor, y: Tensor, output_contiguous: bool = False) -> Tensor:
    """`swiglu`."""
    return _value(swiglu, x, y)


def swiglu_fwdbwd(
    x: Tensor, y: Tensor, g: Tensor, use_weight: bool = False, output_contiguous: bool = False
) -> tuple[Tensor, ...]:
    """Gradients of ``x`` and ``y`` in `swiglu`, and with ``use_weight`` its result."""
    return _gradients(swiglu, (x, y), g, value=use_weight)


def sigmoidglu_fwd(x: Tensor, y: Tensor, output_contiguous: bool = False) -> Tensor:
    """`sigmoidglu`."""
    return _value(sigmoidglu, x, y)


def sigmoidglu_fwdbwd(
    x: Tensor, y: Tensor, g: Tensor, use_weight: bool = False, output_contiguous: bool = False
) -> tuple[Tensor, ...]:
    """Gradients of ``x`` and ``y`` in `sigmoidglu`, and with ``use_weight`` its result."""
    return _gradients(sigmoidglu, (x, y), g, value=use_weight)


def powglu_fwd(x: Tensor, y: Tensor, power: float = 3.0, output_contiguous: bool = False) -> Tensor:
    """`powglu`."""
    return _value(powglu, x, y, power)


def powglu_fwdbwd(
    x: Tensor, y: Tensor, g: Tensor, power: float = 3.0, use_weight: bool = False, output_contiguous: bool = False
) -> tuple[Tensor, ...]:
    """Gradients of ``x`` and ``y`` in `powglu`, and with ``use_weight`` its result."""
    return _gradients(powglu, (x, y), g, power, value=use_weight)


def _named(fn: Callable[..., Tensor]) -> Any:
    return staticmethod(fn)


class SigmoidFunction:
    """``apply(x)``."""

    apply = _named(sigmoid)


class SwishFunction:
    """``apply(x)``."""

    apply = _named(swish)


class LogSigmoidFunction:
    """``apply(x, temperature)``."""

    apply = _named(logsigmoid)


class ELUPlusOneFunction:
    """``apply(x)``."""

    apply = _named(elu_p1)


class FastGeLUFunction:
    """``apply(x)``."""

    apply = _named(fast_gelu_impl)


class GeLUFunction:
    """``apply(y, bias)``."""

    apply = _named(bias_gelu_impl)


class SquaredReLUFunction:
    """``apply(x)``."""

    apply = _named(sqrelu)


class SwiGLUFunction:
    """``apply(x, y)``."""

    apply = _named(swiglu)


class SwiGLULinearFunction:
    """``apply(x, y, weight, bias)``."""

    apply = _named(swiglu_linear)


class SigmoidGLUFunction:
    """``apply(x, y)``."""

    apply = _named(sigmoidglu)


class SigmoidGLULinearFunction:
    """``apply(x, y, weight, bias)``."""

    apply = _named(sigmoidglu_linear)


class PowGLUFunction:
    """``apply(x, y, power)``."""

    apply = _named(powglu)


class PowGLULinearFunction:
    """``apply(x, y, weight, bias, power)``."""

    apply = _named(powglu_linear)


__all__ = [
    "ELUPlusOneFunction",
    "FastGeLUFunction",
    "GeLUFunction",
    "LogSigmoidFunction",
    "PowGLUFunction",
    "PowGLULinearFunction",
    "SigmoidFunction",
    "SigmoidGLUFunction",
    "SigmoidGLULinearFunction",
    "SquaredReLUFunction",
    "SwiGLUFunction",
    "SwiGLULinearFunction",
    "SwishFunction",
    "bias_gelu",
    "bias_gelu_bwd",
    "elu_p1_bwd",
    "elu_p1_fwd",
    "gelu_bwd",
    "gelu_fwd",
    "logsigmoid_bwd",
    "logsigmoid_fwd",
    "powglu_fwd",
    "powglu_fwdbwd",
    "relu_bwd",
    "sigmoid_bwd",
    "sigmoid_fwd",
    "sigmoidglu_fwd",
    "sigmoidglu_fwdbwd",
    "sqrelu_bwd",
    "sqrelu_fwd",
    "swiglu_fwd",
    "swiglu_fwdbwd",
    "swish_bwd",
    "swish_fwd",
]
