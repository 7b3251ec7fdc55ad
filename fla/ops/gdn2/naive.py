# SPDX-License-Identifier: MIT
"""GDN-2 written down."""

from __future__ import annotations

from torch import Tensor

from fla.ops._common.gates import compute_dtype
from fla.ops._delta import naive


def _parts(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor) -> naive.Parts:
    """Query, read key, write key, value and decay of the family's recurrence."""
    dtype = compute_dtype(v.dtype)
    return q, b.to(dtype) * k.to(dtype).repeat_interleave(v.shape[2] // k.shape[2], 2), k, w.to(dtype) * v.to(dtype), g


def naive_recurrent_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Token by token, the ground truth of ``chunk_gdn2``.

    Args:
        q: ``[B, T, H, K]``.
        k: ``[B, T, H, K]``.
        v: ``[B, T, HV, V]``.
        g: log decay (natural) ``[B, T, HV, K]``.
        b: erase gate ``[B, T, HV, K]``.
        w: write gate ``[B, T, HV, V]``.
        scale: factor of the outputs; ``K ** -0.5`` if None.
        initial_state: ``[B, HV, K, V]``.
        output_final_state: return the final state.

    Returns:
        ``o [B, T, HV, V]`` and the final state ``[B, HV, K, V]`` or None, float32 (float64 for float64 inputs).
    """
    o, S = naive.recurrence(*_parts(q, k, v, g, b, w), scale, initial_state)
    return o, S if output_final_state else None


def naive_chunk_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """The chunk form, for any ``T``; arguments and results as ``naive_recurrent_gdn2``."""
    o, S = naive.chunks(*_parts(q, k, v, g, b, w), scale, initial_state, chunk_size=chunk_size)
    return o, S if output_final_state else None
