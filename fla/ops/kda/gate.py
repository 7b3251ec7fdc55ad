# SPDX-License-Identifier: MIT
"""Decay gates of Kimi Delta Attention.

With ``x = g + dt_bias`` and ``a = exp(A_log)`` (1 without ``A_log``), the log decay in natural logarithm is
``-a * softplus(x)``, or ``lower_bound * sigmoid(a * x)`` when a lower bound is given.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fla.backends import CallFacts, dispatch
from fla.ops._common.gate_ops import (
    check_chunk_cumsum,
    check_gate_call,
    check_gate_gradient,
    chunk_cumsum,
    gate_backward,
    gate_outputs,
)
from fla.ops._common.gates import compute_dtype, decay_gate
from fla.ops._common.single import once

_FACTS = CallFacts(tensors=("g",))


class KDAGateFunction(torch.autograd.Function):
    """The gate as one differentiable step that keeps only its inputs; see ``fused_kda_gate``."""

    @staticmethod
    def forward(
        ctx: Any,
        g: Tensor,
        A_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        lower_bound: float | None = None,
        output_dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        ctx.save_for_backward(g, A_log, dt_bias)
        ctx.lower_bound = lower_bound
        return decay_gate(g, A_log, dt_bias, lower_bound, True, compute_dtype(g.dtype)).to(output_dtype)

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        g, A_log, dt_bias = ctx.saved_tensors
        return (*gate_backward(g, A_log, dt_bias, dy, ctx.lower_bound, True), None, None)


def _check(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> None:
    check_gate_call(g, A_log, dt_bias, lower_bound, vector=True)


@dispatch("kda", validate=_check, facts=_FACTS, outputs=gate_outputs)
def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Log decay from a raw gate, differentiable in ``g``, ``A_log`` and ``dt_bias``.

    Args:
        g: raw gate ``[..., HV, K]``, any floating dtype.
        A_log: logarithm of the decay rate, ``HV`` elements of any shape; optional with ``lower_bound``.
        dt_bias: ``HV * K`` elements, head by head.
        lower_bound: selects the bounded form.
        output_dtype: dtype of the result; the arithmetic is float32 (float64 for float64).

    Returns:
        ``[..., HV, K]``, natural logarithm.

    Raises:
        ArgumentError: (ValueError and AssertionError) wrong sizes, or neither ``A_log`` nor ``lower_bound``.
        DtypeError: (also TypeError) not floating.
    """
    return KDAGateFunction.apply(g, A_log, dt_bias, lower_bound, output_dtype)


@dispatch("kda", validate=_check, facts=_FACTS, differentiable=False, outputs=gate_outputs)
def kda_gate_fwd(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``fused_kda_gate`` without gradients."""
    with torch.no_grad():
        return decay_gate(g, A_log, dt_bias, lower_bound, True, compute_dtype(g.dtype)).to(output_dtype)


def _check_bwd(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, dyg: Tensor | None, lower_bound: float | None
) -> None:
    _check(g, A_log, dt_bias, lower_bound)
    check_gate_gradient(g, dyg)


@dispatch("kda", validate=_check_bwd, facts=_FACTS, differentiable=False)
def kda_gate_bwd(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dyg: Tensor | None = None,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients ``(dg, dA, dbias)`` of ``fused_kda_gate`` from ``dyg``, that of its result, in the shapes and dtypes of
    ``g``, ``A_log`` and ``dt_bias``."""
    assert dyg is not None
    with torch.no_grad():
        return gate_backward(g, A_log, dt_bias, dyg, lower_bound, True)


def _check_cumsum(
    g: Tensor,
    A_log: Tensor | None,
    chunk_size: int,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    lower_bound: float | None,
    use_graph: bool,
) -> None:
    _check(g, A_log, dt_bias, lower_bound)
    check_chunk_cumsum(g, chunk_size, 4, cu_seqlens, use_graph)


@dispatch("kda", validate=_check_cumsum, facts=_FACTS, differentiable=False)
def kda_gate_chunk_cumsum(
    g: Tensor,
    A_log: Tensor | None,
    chunk_size: int,
    scale: float | None = None,
    dt_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_dtype: torch.dtype = torch.float32,
    chunk_indices: Tensor | None = None,
    lower_bound: float | None = None,
    use_graph: bool = False,
) -> Tensor:
    """Log decay summed over time within every chunk (no gradients).

    Args:
        g: raw gate ``[B, T, HV, K]``.
        A_log: see ``fused_kda_gate``.
        chunk_size: tokens per chunk, a power of two.
        scale: factor of the sums.
        dt_bias: see ``fused_kda_gate``.
        cu_seqlens: offsets ``[N + 1]`` of packed sequences (``B = 1``); chunks start with each sequence.
        output_dtype: dtype of the result.
        chunk_indices: accepted; the chunks follow from ``cu_seqlens``.
        lower_bound: see ``fused_kda_gate``.
        use_graph: ``cu_seqlens`` may end before ``T``; the remaining rows are 0.

    Returns:
        ``[B, T, HV, K]``.
    """
    with torch.no_grad():
        y = decay_gate(g, A_log, dt_bias, lower_bound, True, compute_dtype(g.dtype))
        return chunk_cumsum(y, chunk_size, scale, cu_seqlens).to(output_dtype)


def _biased(g: Tensor, dt_bias: Tensor | None) -> Tensor:
    x = g.to(compute_dtype(g.dtype))
    return x if dt_bias is None else x + dt_bias.to(x.dtype).view(g.shape[-2:])


def naive_kda_gate(
    g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, output_dtype: torch.dtype = torch.float32
) -> Tensor:
    """``-exp(A_log) * softplus(g + dt_bias)`` for ``g [..., HV, K]``, in plain PyTorch."""
    x = _biased(g, dt_bias)
    return (-A_log.to(x.dtype).view(-1, 1).exp() * F.softplus(x)).to(output_dtype)


def naive_kda_lowerbound_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float = -5.0,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))`` for ``g [..., HV, K]``, in plain PyTorch."""
    x = _biased(g, dt_bias)
    rate: Any = 1.0 if A_log is None else A_log.to(x.dtype).view(-1, 1).exp()
    return (lower_bound * torch.sigmoid(rate * x)).to(output_dtype)
