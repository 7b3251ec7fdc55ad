# SPDX-License-Identifier: MIT
"""Decay gate of the gated delta rule: ``-exp(A_log) * softplus(g + dt_bias)``, natural logarithm."""

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


class GDNGateFunction(torch.autograd.Function):
    """The gate as one differentiable step that keeps only its inputs; see ``fused_gdn_gate``."""

    @staticmethod
    def forward(
        ctx: Any,
        g: Tensor,
        A_log: Tensor,
        dt_bias: Tensor | None = None,
        output_dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        ctx.save_for_backward(g, A_log, dt_bias)
        return decay_gate(g, A_log, dt_bias, None, False, compute_dtype(g.dtype)).to(output_dtype)

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        g, A_log, dt_bias = ctx.saved_tensors
        return (*gate_backward(g, A_log, dt_bias, dy, None, False), None)


def _check(g: Tensor, A_log: Tensor, dt_bias: Tensor | None) -> None:
    check_gate_call(g, A_log, dt_bias, None, vector=False)


@dispatch("gated_delta_rule", validate=_check, facts=_FACTS, outputs=gate_outputs)
def fused_gdn_gate(
    g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, output_dtype: torch.dtype = torch.float32
) -> Tensor:
    """Log decay from a raw gate, differentiable in ``g``, ``A_log`` and ``dt_bias``.

    Args:
        g: raw gate ``[..., HV]``, any floating dtype.
        A_log: logarithm of the decay rate, ``HV`` elements.
        dt_bias: ``HV`` elements.
        output_dtype: dtype of the result; the arithmetic is float32 (float64 for float64).

    Returns:
        ``[..., HV]``, natural logarithm.

    Raises:
        ArgumentError: (ValueError and AssertionError) wrong sizes or no ``A_log``.
        DtypeError: (also TypeError) not floating.
    """
    return GDNGateFunction.apply(g, A_log, dt_bias, output_dtype)


@dispatch("gated_delta_rule", validate=_check, facts=_FACTS, differentiable=False, outputs=gate_outputs)
def gdn_gate_fwd(
    g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, output_dtype: torch.dtype = torch.float32
) -> Tensor:
    """``fused_gdn_gate`` without gradients."""
    with torch.no_grad():
        return decay_gate(g, A_log, dt_bias, None, False, compute_dtype(g.dtype)).to(output_dtype)


def _check_bwd(g: Tensor, A_log: Tensor, dt_bias: Tensor | None, dyg: Tensor) -> None:
    _check(g, A_log, dt_bias)
    check_gate_gradient(g, dyg)


@dispatch("gated_delta_rule", validate=_check_bwd, facts=_FACTS, differentiable=False)
def gdn_gate_bwd(
    g: Tensor, A_log: Tensor, dt_bias: Tensor | None, dyg: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients ``(dg, dA, dbias)`` of ``fused_gdn_gate`` from ``dyg``, that of its result, in the shapes and dtypes of
    ``g``, ``A_log`` and ``dt_bias``."""
    with torch.no_grad():
        return gate_backward(g, A_log, dt_bias, dyg, None, False)


def _check_cumsum(g: Tensor, A_log: Tensor, chunk_size: int, dt_bias: Tensor | None, cu_seqlens: Tensor | None) -> None:
    _check(g, A_log, dt_bias)
    check_chunk_cumsum(g, chunk_size, 3, cu_seqlens)


@dispatch("gated_delta_rule", validate=_check_cumsum, facts=_FACTS, differentiable=False)
def gdn_gate_chunk_cumsum(
    g: Tensor,
    A_log: Tensor,
    chunk_size: int,
    scale: float | None = None,
    dt_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Log decay summed over time within every chunk (no gradients).

    Args:
        g: raw gate ``[B, T, HV]``.
        A_log: see ``fused_gdn_gate``.
        chunk_size: tokens per chunk, a power of two.
        scale: factor of the sums.
        dt_bias: see ``fused_gdn_gate``.
        cu_seqlens: offsets ``[N + 1]`` of packed sequences (``B = 1``); chunks start with each sequence.
        chunk_indices: accepted; the chunks follow from ``cu_seqlens``.
        output_dtype: dtype of the result.

    Returns:
        ``[B, T, HV]``.
    """
    with torch.no_grad():
        y = decay_gate(g, A_log, dt_bias, None, False, compute_dtype(g.dtype))
        return chunk_cumsum(y, chunk_size, scale, cu_seqlens).to(output_dtype)


def naive_gdn_gate(
    g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, output_dtype: torch.dtype = torch.float32
) -> Tensor:
    """``-exp(A_log) * softplus(g + dt_bias)`` for ``g [..., HV]``, in plain PyTorch."""
    x = g.to(compute_dtype(g.dtype))
    if dt_bias is not None:
        x = x + dt_bias.to(x.dtype)
    return (-A_log.to(x.dtype).exp() * F.softplus(x)).to(output_dtype)
