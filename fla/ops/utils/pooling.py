# SPDX-License-Identifier: MIT
"""Means over chunks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fla.backends import needs_backward
from fla.ops._common import checks
from fla.ops._common.checks import ArgumentError
from fla.ops._common.single import once, savable
from fla.ops.utils.core import chunk_means, chunk_means_grad

__all__ = ["mean_pooling"]


class _Means(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, chunk: int, cu_seqlens: Tensor | None) -> Tensor:
        ctx.shape, ctx.chunk = x.shape, chunk
        ctx.save_for_backward(savable(cu_seqlens))
        return chunk_means(x, chunk, cu_seqlens)

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return chunk_means_grad(dy, tuple(ctx.shape), ctx.chunk, *ctx.saved_tensors), None, None


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
    if needs_backward((x,)):
        return _Means.apply(x, chunk_size, cu_seqlens)
    return chunk_means(x, chunk_size, cu_seqlens)
