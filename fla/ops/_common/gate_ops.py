# SPDX-License-Identifier: MIT
"""Gate functions that ops export by themselves: forward, backward, differentiable, and summed within chunks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fla.ops._common.checks import (
    ArgumentError,
    check_floating,
    check_numel,
    check_power_of_two,
    check_same_device,
    check_tensor,
    check_varlen,
)
from fla.ops._common.gates import compute_dtype
from fla.ops._common.varlen import plan_chunks


def check_gate_call(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None, vector: bool
) -> None:
    """Check a raw gate ``[..., HV, K]`` (``vector``) or ``[..., HV]`` and its parameters."""
    check_tensor("g", g)
    check_floating(g=g, A_log=A_log, dt_bias=dt_bias)
    check_same_device(g=g, A_log=A_log, dt_bias=dt_bias)
    rank = 2 if vector else 1
    if g.dim() < rank:
        raise ArgumentError(f"`g` must have shape [..., {'HV, K' if vector else 'HV'}], got {list(g.shape)}.")
    if A_log is None and lower_bound is None:
        raise ArgumentError("The gate needs `A_log`" + (" or `lower_bound`." if vector else "."))
    heads = g.shape[-rank]
    check_numel("A_log", A_log, heads, "one per head")
    check_numel("dt_bias", dt_bias, heads * g.shape[-1] if vector else heads, "one per channel of `g`")


def check_gate_gradient(g: Tensor, dyg: Tensor | None) -> None:
    """Check the gradient of a gate's result."""
    check_tensor("dyg", dyg)
    assert dyg is not None
    if dyg.shape != g.shape:
        raise ArgumentError(f"`dyg` must have the shape of `g`, {list(g.shape)}, got {list(dyg.shape)}.")


def gate_outputs(g: Tensor, output_dtype: torch.dtype) -> Tensor:
    """Empty result of a gate, for compilers."""
    return torch.empty_like(g, dtype=output_dtype, memory_format=torch.contiguous_format)


def gate_backward(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, dy: Tensor, lower_bound: float | None, vector: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of ``decay_gate``: of ``g``, ``A_log``, ``dt_bias`` in their shapes and dtypes (None where not
    given)."""
    dtype = compute_dtype(g.dtype)
    rest = g.shape[-2:] if vector else g.shape[-1:]
    x = g.to(dtype)
    if dt_bias is not None:
        x = x + dt_bias.to(dtype).reshape(rest)
    dy = dy.to(dtype)
    rate: Tensor | float = 1.0
    if A_log is not None:
        rate = A_log.to(dtype).exp().reshape(-1, 1) if vector else A_log.to(dtype).exp().reshape(-1)
    if lower_bound is None:
        d_x = -rate * dy * torch.sigmoid(x)
        d_log_rate = -rate * dy * F.softplus(x)
    else:
        s = torch.sigmoid(rate * x)
        d_x = rate * dy * lower_bound * s * (1 - s)
        d_log_rate = d_x * x
    leading = tuple(range(g.dim() - len(rest)))
    dA = d_bias = None
    if A_log is not None:
        dA = d_log_rate.sum((*leading, -1) if vector else leading) if g.dim() > 1 else d_log_rate
        dA = dA.reshape(A_log.shape).to(A_log.dtype)
    if dt_bias is not None:
        d_bias = (d_x.sum(leading) if leading else d_x).reshape(dt_bias.shape).to(dt_bias.dtype)
    return d_x.to(g.dtype), dA, d_bias


def check_chunk_cumsum(
    g: Tensor, chunk_size: int, rank: int, cu_seqlens: Tensor | None, allow_uncovered: bool = False
) -> None:
    """Check the arguments of a sum within chunks beyond those of the gate."""
    if g.dim() != rank:
        raise ArgumentError(f"`g` must have {rank} axes, got shape {list(g.shape)}.")
    check_power_of_two("chunk_size", chunk_size)
    device = None if cu_seqlens is None else g.device
    check_varlen(cu_seqlens, None, g.shape[0], g.shape[1], device=device, allow_uncovered=allow_uncovered)


def chunk_cumsum(y: Tensor, chunk_size: int, scale: float | None, cu_seqlens: Tensor | None) -> Tensor:
    """Inclusive sum of ``y [B, T, ...]`` over time, restarted in every chunk of every sequence, times ``scale``."""
    plan = plan_chunks(y.shape[0], y.shape[1], chunk_size, y.device, cu_seqlens)
    total = plan.unpack(plan.pack(y).cumsum(1))
    return total if scale is None else total * scale
