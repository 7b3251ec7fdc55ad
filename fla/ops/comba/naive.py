# SPDX-License-Identifier: MIT
"""Comba written down."""

from __future__ import annotations

from torch import Tensor

from fla.ops._common.gates import compute_dtype
from fla.ops._delta import naive


def _parts(q: Tensor, k: Tensor, v: Tensor, p: Tensor, g: Tensor, beta: Tensor) -> naive.Parts:
    """Query, read key, write key, value and decay of the family's recurrence."""
    dtype = compute_dtype(v.dtype)
    beta = beta.to(dtype).unsqueeze(-1)
    p = p.to(dtype).repeat_interleave(v.shape[2] // p.shape[2], 2)
    return q, beta * p, k, beta * v.to(dtype), g.unsqueeze(-1)


def naive_recurrent_comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    beta: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Token by token, the ground truth of ``chunk_comba``. Mind the order: ``beta`` before ``g``.

    The rule reads the state before its decay, as all forms of the op do. (The function of this name in release 0.6.0
    of the reference package reads the decayed state and disagrees with the other forms there.)

    Args:
        q: ``[B, T, H, K]``.
        k: ``[B, T, H, K]``.
        v: ``[B, T, HV, V]``.
        p: ``[B, T, H, K]``.
        beta: ``[B, T, HV]``.
        g: log decay (natural) ``[B, T, HV]``.
        scale: factor of the outputs; ``K ** -0.5`` if None.
        initial_state: ``[B, HV, K, V]``.
        output_final_state: return the final state.

    Returns:
        ``o [B, T, HV, V]`` and the final state ``[B, HV, K, V]`` or None, float32 (float64 for float64 inputs).
    """
    o, S = naive.recurrence(*_parts(q, k, v, p, g, beta), scale, initial_state, exclusive=True)
    return o, S if output_final_state else None


def naive_chunk_comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The chunk form, for any ``T``; arguments and results as ``naive_recurrent_comba``, ``g`` before ``beta``."""
    o, S = naive.chunks(*_parts(q, k, v, p, g, beta), scale, initial_state, exclusive=True, chunk_size=chunk_size)
    return o, S if output_final_state else None
