# SPDX-License-Identifier: MIT
"""Pointwise activations and their gated (two-input) forms.

Everything is computed in float32 (float64 for float64 inputs) and rounded once to the dtype of the first input.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fla.backends import dispatch
from fla.modules._checks import check_beside
from fla.modules._covers import covers_linear, covers_one, covers_two
from fla.modules._dtype import autocast_dtype, upcast
from fla.modules._facts import ROWS
from fla.ops._common.checks import ArgumentError

__all__ = [
    "ACT2FN",
    "bias_gelu_impl",
    "elu_p1",
    "fast_gelu_impl",
    "logsigmoid",
    "powglu",
    "powglu_linear",
    "sigmoid",
    "sigmoidglu",
    "sigmoidglu_linear",
    "sqrelu",
    "swiglu",
    "swiglu_linear",
    "swish",
]


def _pointwise(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return f(upcast(x)).to(x.dtype)


@dispatch("modules", facts=ROWS, triton="fla.modules._pointwise.entry:sigmoid", triton_verifier=covers_one)
def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + exp(-x))``, any shape."""
    return _pointwise(torch.sigmoid, x)


@dispatch("modules", facts=ROWS, triton="fla.modules._pointwise.entry:logsigmoid", triton_verifier=covers_one)
def logsigmoid(x: Tensor, temperature: float = 1.0, output_dtype: torch.dtype | None = None) -> Tensor:
    """``log(sigmoid(x)) / temperature``, any shape, in ``output_dtype``; that of ``x`` when None."""
    return (F.logsigmoid(upcast(x)) / temperature).to(x.dtype if output_dtype is None else output_dtype)


@dispatch("modules", facts=ROWS, triton="fla.modules._pointwise.entry:swish", triton_verifier=covers_one)
def swish(x: Tensor) -> Tensor:
    """``x * sigmoid(x)`` (SiLU), any shape."""
    return _pointwise(F.silu, x)


@dispatch("modules", facts=ROWS, triton="fla.modules._pointwise.entry:elu_p1", triton_verifier=covers_one)
def elu_p1(x: Tensor) -> Tensor:
    """``elu(x) + 1``: ``x + 1`` where ``x >= 0``, else ``exp(x)``, which keeps its precision near zero."""
    return _pointwise(lambda u: torch.where(u >= 0, u + 1, torch.exp(u.clamp(max=0))), x)


@dispatch("modules", facts=ROWS, triton="fla.modules._pointwise.entry:sqrelu", triton_verifier=covers_one)
def sqrelu(x: Tensor) -> Tensor:
    """``relu(x) ** 2``, any shape."""
    return _pointwise(lambda u: F.relu(u).square(), x)


@dispatch("modules", facts=ROWS, triton="fla.modules._pointwise.entry:fast_gelu_impl", triton_verifier=covers_one)
def fast_gelu_impl(x: Tensor) -> Tensor:
    """GELU in its tanh approximation, any shape."""
    return _pointwise(lambda u: F.gelu(u, approximate="tanh"), x)


def bias_gelu_impl(y: Tensor, bias: Tensor) -> Tensor:
    """GELU (tanh approximation) of ``y + bias``, ``bias`` ``[D]``."""
    return fast_gelu_impl(y + bias)


def _check_pair(x: Tensor, y: Tensor, *_: object) -> None:
    if x.shape != y.shape:
        raise ArgumentError(f"`y` must have the shape of `x`, {list(x.shape)}, got {list(y.shape)}.")
    check_beside(x, y=y)


def _glu(gate: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return (gate(upcast(x)) * upcast(y)).to(x.dtype)


def _power_gate(u: Tensor, power: float) -> Tensor:
    # Both branches are evaluated; the clamp keeps log and sqrt of the unused one finite, and with them the gradient.
    base = u.clamp(min=torch.finfo(u.dtype).tiny)
    exponent = power / (base.sqrt() + 1)
    return torch.where(u > 0, base.pow(exponent), u) * torch.sigmoid(u)


@dispatch(
    "modules",
    facts=ROWS,
    validate=_check_pair,
    triton="fla.modules._pointwise.entry:swiglu",
    triton_verifier=covers_two,
)
def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """``swish(x) * y``; both of one shape."""
    return _glu(F.silu, x, y)


@dispatch(
    "modules",
    facts=ROWS,
    validate=_check_pair,
    triton="fla.modules._pointwise.entry:sigmoidglu",
    triton_verifier=covers_two,
)
def sigmoidglu(x: Tensor, y: Tensor) -> Tensor:
    """``sigmoid(x) * y``; both of one shape."""
    return _glu(torch.sigmoid, x, y)


@dispatch(
    "modules",
    facts=ROWS,
    validate=_check_pair,
    triton="fla.modules._pointwise.entry:powglu",
    triton_verifier=covers_two,
)
def powglu(x: Tensor, y: Tensor, power: float = 3.0) -> Tensor:
    """``gate(x) * y`` with ``gate(x) = x ** (power / (sqrt(x) + 1)) * sigmoid(x)`` for positive ``x``, else swish."""
    return _glu(lambda u: _power_gate(u, power), x, y)


def _check_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    _check_pair(x, y)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ArgumentError(f"`weight` must have shape [O, {x.shape[-1]}], got {list(weight.shape)}.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ArgumentError(f"`bias` must have shape [{weight.shape[0]}], got {list(bias.shape)}.")
    check_beside(x, weight=weight, bias=bias)


def _linear(h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    dtype = autocast_dtype(h)
    return F.linear(h.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


@dispatch(
    "modules",
    facts=ROWS,
    validate=_check_linear,
    triton="fla.modules._pointwise.entry:swiglu_linear",
    triton_verifier=covers_linear,
)
def swiglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear(swiglu(x, y), weight, bias)`` with ``weight`` ``[O, D]``; the dtype follows autocast."""
    return _linear(_glu(F.silu, x, y), weight, bias)


@dispatch(
    "modules",
    facts=ROWS,
    validate=_check_linear,
    triton="fla.modules._pointwise.entry:sigmoidglu_linear",
    triton_verifier=covers_linear,
)
def sigmoidglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear(sigmoidglu(x, y), weight, bias)`` with ``weight`` ``[O, D]``; the dtype follows autocast."""
    return _linear(_glu(torch.sigmoid, x, y), weight, bias)


@dispatch(
    "modules",
    facts=ROWS,
    validate=_check_linear,
    triton="fla.modules._pointwise.entry:powglu_linear",
    triton_verifier=covers_linear,
)
def powglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, power: float = 3.0) -> Tensor:
    """``F.linear(powglu(x, y, power), weight, bias)`` with ``weight`` ``[O, D]``; the dtype follows autocast."""
    return _linear(_glu(lambda u: _power_gate(u, power), x, y), weight, bias)


ACT2FN: dict[str, Callable[..., Tensor]] = {
    "relu": F.relu,
    "sigmoid": sigmoid,
    "logsigmoid": logsigmoid,
    "silu": swish,
    "swish": swish,
    "sqrelu": sqrelu,
    "gelu": fast_gelu_impl,
    "bias_gelu": bias_gelu_impl,
}
"""Activations by the names that configurations use."""
