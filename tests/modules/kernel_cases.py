# SPDX-License-Identifier: MIT
"""Runs a module function on its Triton kernels and on its PyTorch path in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fla.backends import last_decision, use_backend


def gradients(fn: Callable[..., Any], leaves: dict[str, Tensor], kw: dict[str, Any], seed: int = 1) -> list[Tensor]:
    """Outputs, then gradients of all ``leaves`` against fixed random ones of the outputs."""
    out = fn(**leaves, **kw)
    out = [o for o in (out if isinstance(out, tuple) else (out,)) if o is not None]
    torch.manual_seed(seed)
    grads = [torch.randn(o.shape, dtype=torch.float64).to(o.dtype) for o in out]
    return [*out, *torch.autograd.grad(out, list(leaves.values()), grads)]


def assert_kernels_match(
    fn: Callable[..., Any],
    tensors: dict[str, Tensor],
    limit: float = 1e-5,
    exact: dict[str, Any] | None = None,
    **kw: Any,
) -> None:
    """``fn`` on Triton equals ``fn`` in float64 on PyTorch, in results and gradients. ``exact`` replaces keywords of
    the latter."""
    with use_backend("triton"):
        got = gradients(fn, {n: t.clone().requires_grad_() for n, t in tensors.items()}, kw)
        decision = last_decision()
        assert decision is not None
        assert decision.backend == "triton", decision.rejections
    want = gradients(fn, {n: t.double().requires_grad_() for n, t in tensors.items()}, {**kw, **(exact or {})})
    decision = last_decision()
    assert decision is not None
    assert decision.backend == "torch"
    names = [f"output {i}" for i in range(len(got) - len(tensors))] + [f"gradient of {n}" for n in tensors]
    for name, a, b in zip(names, got, want, strict=True):
        assert a.shape == b.shape, name
        error = (a.double() - b).norm() / (b.norm() + 1e-12)
        assert error < limit or (a.double() - b).abs().max() < 1e-6, f"{name}: {error:.1e}"
