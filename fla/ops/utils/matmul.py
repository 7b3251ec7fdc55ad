# SPDX-License-Identifier: MIT
"""Matrix products accumulated in float32 (float64 for float64), with an activation. Differentiable."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fla.ops._common import checks
from fla.ops._common.gates import compute_dtype

__all__ = ["addmm", "matmul"]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.01),
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def _product(a: Tensor, b: Tensor) -> Tensor:
    checks.check_shapes(a=(a, "M K | B M K"), b=(b, "K N"))
    checks.check_same_device(a=a, b=b)
    wide = compute_dtype(a.dtype)
    return a.to(wide) @ b.to(wide)


def matmul(a: Tensor, b: Tensor, activation: str = "") -> Tensor:
    """``activation(a @ b)`` of ``[M, K]`` or ``[B, M, K]`` and ``[K, N]``, in the dtype of a.

    Raises:
        ValueError (and AssertionError): shapes that do not fit; an `activation` other than leaky_relu (slope 0.01),
            relu, sigmoid, tanh or an empty string.
    """
    checks.check_choice("activation", activation, _ACTIVATIONS)
    return _ACTIVATIONS[activation](_product(a, b)).to(a.dtype)


def addmm(
    x: Tensor, a: Tensor, b: Tensor, alpha: float | Tensor | None = None, beta: float | Tensor | None = None
) -> Tensor:
    """``beta x + alpha (a @ b)`` with ``x`` ``[N]`` or ``[M, N]``, the rest as in :func:`matmul`; None counts as 1."""
    y = _product(a, b)
    sizes = {"M": y.shape[-2], "N": y.shape[-1]}
    checks.check_shapes(sizes, x=(x, "N | M N"))
    if alpha is not None:
        y = y * alpha
    wide = x.to(y.dtype)
    return (y + (wide if beta is None else wide * beta)).to(a.dtype)
