# SPDX-License-Identifier: MIT
"""Sinkhorn normalisation of small square matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from fla.ops._common.checks import ArgumentError

__all__ = ["naive_sinkhorn", "sinkhorn"]


def naive_sinkhorn(logits: Tensor, num_iters: int = 20) -> Tensor:
    """The steps of :func:`sinkhorn`, unchecked."""
    x = logits.float()
    for _ in range(num_iters):
        x = x - x.logsumexp(-2, keepdim=True)
        x = x - x.logsumexp(-1, keepdim=True)
    return x.exp()


def sinkhorn(logits: Tensor, num_iters: int = 20) -> Tensor:
    """Matrices with nearly equal row and column sums: columns, then rows are normalised, again and again.

    Args:
        logits: ``[..., N, N]`` with N from 1 to 8; float16, bfloat16 or float32.
        num_iters: number of rounds.

    Returns:
        ``[..., N, N]`` in float32. Differentiable.

    Raises:
        ValueError: dtype, shape or number of rounds.
    """
    if logits.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ArgumentError(f"`logits` must be float16, bfloat16 or float32, got {logits.dtype}.")
    if logits.dim() < 2 or logits.shape[-1] != logits.shape[-2] or not 1 <= logits.shape[-1] <= 8:
        raise ArgumentError(f"`logits` must have shape [..., N, N] with N from 1 to 8, got {list(logits.shape)}.")
    if isinstance(num_iters, bool) or not isinstance(num_iters, int) or num_iters < 1:
        raise ArgumentError(f"`num_iters` must be a positive int, got {num_iters!r}.")
    return naive_sinkhorn(logits, num_iters)
