# SPDX-License-Identifier: MIT
"""Means over chunks."""

from __future__ import annotations

from torch import Tensor

from fla.ops._common import checks
from fla.ops._common.checks import ArgumentError
from fla.ops._common.gates import compute_dtype
from fla.ops._common.varlen import plan_chunks

__all__ = ["mean_pooling"]


def mean_pooling(x: Tensor, chunk_size: int, cu_seqlens: Tensor | None = None, *, head_first: object = None) -> Tensor:
    """Mean of each chunk; the last one of a sequence is divided by its own length. Differentiable.

    Args:
        x: ``[B, T, H, D]``.
        chunk_size: tokens per chunk.
        cu_seqlens: boundaries of packed sequences ``[N + 1]``; B must be 1.
        head_first: removed; raises DeprecationWarning.

    Returns:
        ``[B, ceil(T / chunk_size), H, D]``, or ``[1, total chunks, H, D]`` packed, in the dtype of x; sums are float32.

    Raises:
        ValueError: another rank, a batch of packed sequences, a chunk size below 1.
    """
    if head_first is not None:
        raise DeprecationWarning("`head_first` was removed: pass `x` as [B, T, H, D].")
    sizes = checks.check_shapes(x=(x, "B T H D"))
    if chunk_size < 1:
        raise ArgumentError(f"`chunk_size` must be at least 1, got {chunk_size}.")
    checks.check_varlen(cu_seqlens, None, sizes["B"], sizes["T"])
    dtype = compute_dtype(x.dtype)
    plan = plan_chunks(sizes["B"], sizes["T"], chunk_size, x.device, cu_seqlens)
    counts = plan.pack(x.new_ones(x.shape[:2], dtype=dtype)).sum(1)
    means = plan.pack(x.to(dtype)).sum(1) / counts[:, None, None]
    return plan.chunk_states(means).to(x.dtype)
