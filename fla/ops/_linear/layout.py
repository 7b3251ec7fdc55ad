# SPDX-License-Identifier: MIT
"""Between the caller's ``[B, T, H, ...]`` and the engine's contiguous chunks ``[M, H, C, ...]``: one copy each way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fla.ops._common.single import unbatched
from fla.ops._common.varlen import ChunkPlan

__all__ = ["to_chunks", "to_tokens"]


def to_chunks(x: Tensor, plan: ChunkPlan, dtype: torch.dtype) -> Tensor:
    """``[B, T, H, ...]`` of any strides to new contiguous ``[M, H, C, ...]`` of `dtype`, zero in padding.

    Differentiable.
    """
    return _ToChunks.apply(x, plan, dtype)


def to_tokens(x: Tensor, plan: ChunkPlan, dtype: torch.dtype) -> Tensor:
    """``[M, H, C, ...]`` to new contiguous ``[B, T, H, ...]`` of `dtype`. Differentiable."""
    return _ToTokens.apply(x, plan, dtype)


def _copy_to_chunks(x: Tensor, plan: ChunkPlan, dtype: torch.dtype) -> Tensor:
    C, feature = plan.chunk, x.shape[2:]
    out = torch.empty(plan.chunks, feature[0], C, *feature[1:], dtype=dtype, device=x.device)
    by_row = out.transpose(1, 2)  # [M, C, H, ...]
    if plan.index is not None:
        by_row.copy_(plan.pack(x))
        return out
    by_row = by_row.unflatten(0, (len(plan.steps), x.shape[0]))  # [NT, B, C, H, ...]
    full, rest = divmod(plan.tokens, C)
    if full:
        by_row[:full].copy_(x[:, : full * C].unflatten(1, (full, C)).transpose(0, 1))
    if rest:
        by_row[full, :, :rest].copy_(x[:, full * C :])
        by_row[full, :, rest:] = 0
    return out


def _copy_to_tokens(x: Tensor, plan: ChunkPlan, dtype: torch.dtype) -> Tensor:
    by_row = x.transpose(1, 2)
    if plan.index is not None:
        return plan.unpack(by_row).to(dtype)
    C, B = plan.chunk, plan.sequences
    out = torch.empty(B, plan.tokens, *by_row.shape[2:], dtype=dtype, device=x.device)
    by_row = by_row.unflatten(0, (len(plan.steps), B))
    full, rest = divmod(plan.tokens, C)
    if full:
        out[:, : full * C].unflatten(1, (full, C)).copy_(by_row[:full].transpose(0, 1))
    if rest:
        out[:, full * C :].copy_(by_row[full, :, :rest])
    return out


class _ToChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: ChunkPlan, dtype: torch.dtype) -> Tensor:
        ctx.plan, ctx.dtype = plan, x.dtype
        return _copy_to_chunks(x, plan, dtype)

    @staticmethod
    @unbatched
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return to_tokens(grad, ctx.plan, ctx.dtype), None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: ChunkPlan, dtype: torch.dtype) -> Tensor:
        ctx.plan, ctx.dtype = plan, x.dtype
        return _copy_to_tokens(x, plan, dtype)

    @staticmethod
    @unbatched
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return to_chunks(grad, ctx.plan, ctx.dtype), None, None
