# SPDX-License-Identifier: MIT
"""Activations that ops apply inside: l2 normalisation, decay gates, the write gate. All in float32 (float64 for
float64)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

_F = TypeVar("_F", bound=Callable[..., Any])


def needs_range(dtype: torch.dtype) -> bool:
    """Whether the 16-bit kernels of a delta rule can run out of range: float16 ends at 65504, and long keys, large
    states, values or gradients go beyond."""
    return dtype == torch.float16


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype that inputs of ``dtype`` are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def to_output(o: Tensor, dtype: torch.dtype) -> Tensor:
    """``o`` in the dtype that an op returns. float16 saturates: what float32 still holds does not become infinite."""
    if dtype == torch.float16 and o.dtype != dtype:
        o = o.clamp(-65504.0, 65504.0)
    return o.to(dtype)


def without_autocast(fn: _F) -> _F:
    """Run ``fn`` with autocast off: it chooses its own precision."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        enabled = [device for device in ("cpu", "cuda", "xpu") if torch.is_autocast_enabled(device)]
        if not enabled:
            return fn(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            for device in enabled:
                stack.enter_context(torch.autocast(device, enabled=False))
            return fn(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def l2_normalise(x: Tensor, eps: float = 1e-6) -> Tensor:
    """``x / sqrt(sum(x^2) + eps)`` over the last axis of a float32 or float64 tensor."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def write_gate(beta: Tensor, sigmoid: bool, allow_neg_eigval: bool, dtype: torch.dtype) -> Tensor:
    """``beta``, or ``sigmoid(beta)``, twice that with ``allow_neg_eigval``, in ``dtype``."""
    beta = beta.to(dtype)
    if sigmoid:
        beta = beta.sigmoid()
        if allow_neg_eigval:
            beta = 2.0 * beta
    return beta


def decay_gate(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None, vector: bool, dtype: torch.dtype
) -> Tensor:
    """Natural-log decay from a raw gate ``g``, ``[..., HV, K]`` with ``vector`` or ``[..., HV]`` without.

    ``-exp(A_log) * softplus(g + dt_bias)``, or ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))`` with a bound,
    where ``A_log = None`` stands for zero. ``A_log`` has ``HV`` elements, ``dt_bias`` as many as one token of ``g``.
    """
    x = g.to(dtype)
    if dt_bias is not None:
        x = x + dt_bias.to(dtype).reshape(x.shape[-2:] if vector else x.shape[-1:])
    rate = None
    if A_log is not None:
        rate = A_log.to(dtype).exp()
        rate = rate.reshape(-1, 1) if vector else rate.reshape(-1)
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(x if rate is None else rate * x)
    if rate is None:
        raise AssertionError("a gate without lower_bound needs A_log")
    return -rate * F.softplus(x)
