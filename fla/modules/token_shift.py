# SPDX-License-Identifier: MIT
"""Difference between each token and the one before it, as RWKV mixes them (https://arxiv.org/abs/2305.13048)."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from fla.backends import CallFacts, dispatch
from fla.modules._covers import covers_shift
from fla.ops._common.checks import ArgumentError, check_floating, check_numel, check_same_device, check_varlen

__all__ = ["TokenShift", "prepare_maxlens", "token_shift", "token_shift_bwd", "token_shift_fwd", "token_shift_ref"]

_FACTS = CallFacts(tensors=("x",), key="x", value="x", initial_state="cache", state_v_first=None)


def prepare_maxlens(cu_seqlens: Tensor) -> int:
    """Length of the longest sequence. Waits for the device."""
    return int(cu_seqlens.diff().max()) if cu_seqlens.numel() > 1 else 0


def _edges(cu_seqlens: Tensor, T: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sequence of every token ``[T]``, whether it is the first or the last of it, and which sequences are empty."""
    offsets = cu_seqlens.long()
    token = torch.arange(T, device=offsets.device)
    owner = torch.searchsorted(offsets[1:].contiguous(), token, right=True)
    return owner, token == offsets[owner], token == offsets[owner + 1] - 1, offsets.diff() == 0


def token_shift_fwd(
    x: Tensor,
    cu_seqlens: Tensor | None = None,
    cache: Tensor | None = None,
    output_cache: bool = False,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``(y, cache_out or None)``; arguments as for :func:`token_shift`, unchecked."""
    B, T, D = x.shape
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    first = x.new_zeros(N, D) if cache is None else cache.reshape(N, D).to(x.dtype)
    out: Tensor | None = None
    if cu_seqlens is None or T == 0:
        y = torch.cat([first[:B, None], x[:, :-1]], 1) - x if T else torch.empty_like(x)
        if output_cache:
            out = x[:, -1].clone() if T else first.clone()
        return y, out
    owner, is_first, _, empty = _edges(cu_seqlens, T)
    before = torch.cat([x[:, :1], x[:, :-1]], 1).where(~is_first[:, None], first.index_select(0, owner))
    if output_cache:
        out = first.where(empty[:, None], x[0].index_select(0, (cu_seqlens[1:].long() - 1).clamp(min=0)))
    return before - x, out


def token_shift_bwd(
    dy: Tensor,
    N: int,
    T: int,
    dcache: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    use_short_kernel: bool = True,
    has_init_cache: bool = False,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of ``x`` and, with ``has_init_cache``, of the cache ``[N, D]``.

    Args:
        dy: ``[B, T, D]``.
        N: number of sequences.
        T: number of tokens.
        dcache: ``[N, D]``, gradient of the returned cache.
        cu_seqlens: as for :func:`token_shift`.
        use_short_kernel, chunk_indices: accepted for callers of the reference package and not needed.
    """
    D = dy.shape[-1]
    last = dy.new_zeros(N, D) if dcache is None else dcache.reshape(N, D).to(dy.dtype)
    if T == 0:
        return torch.empty_like(dy), last.clone() if has_init_cache else None
    if cu_seqlens is None:
        return torch.cat([dy[:, 1:], last[:, None]], 1) - dy, dy[:, 0].clone() if has_init_cache else None
    owner, _, is_last, empty = _edges(cu_seqlens, T)
    after = torch.cat([dy[:, 1:], dy[:, :1]], 1).where(~is_last[:, None], last.index_select(0, owner))
    start = cu_seqlens[:-1].long().clamp(max=T - 1)
    # The cache of an empty sequence is passed on as it is.
    return after - dy, last.where(empty[:, None], dy[0].index_select(0, start)) if has_init_cache else None


class TokenShift(torch.autograd.Function):
    """Autograd of :func:`token_shift`; ``apply`` returns ``(y, cache_out or None)``. Nothing of ``x`` is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cu_seqlens: Tensor | None = None,
        cache: Tensor | None = None,
        output_cache: bool = False,
        chunk_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.cu_seqlens = cu_seqlens
        ctx.cache = None if cache is None else (cache.shape, cache.dtype)
        return token_shift_fwd(x, cu_seqlens, cache, output_cache)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dout: Tensor | None = None) -> tuple[Tensor | None, ...]:
        cu_seqlens = ctx.cu_seqlens
        N = dy.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
        has_cache = ctx.cache is not None
        dx, dcache = token_shift_bwd(dy, N, dy.shape[1], dout, cu_seqlens, has_init_cache=has_cache)
        if dcache is not None:
            dcache = dcache.reshape(ctx.cache[0]).to(ctx.cache[1])
        return dx, None, dcache, None, None


def _check(x: Tensor, cu_seqlens: Tensor | None, cache: Tensor | None) -> None:
    if x.dim() != 3:
        raise ArgumentError(f"`x` must have shape [B, T, D], got {list(x.shape)}.")
    check_floating(x=x, cache=cache)
    check_same_device(x=x, cache=cache)
    N = check_varlen(cu_seqlens, None, x.shape[0], x.shape[1], device=x.device)
    if cache is not None:
        check_numel("cache", cache, N * x.shape[2], "N * D, the last token of every sequence")


def _outputs(
    x: Tensor, cu_seqlens: Tensor | None, cache: Tensor | None, output_cache: bool, chunk_indices: Tensor | None
) -> Tensor | tuple[Tensor, Tensor]:
    y = x.new_empty(x.shape)
    N = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return (y, x.new_empty(N, x.shape[2])) if output_cache else y


@dispatch(
    "modules",
    facts=_FACTS,
    validate=_check,
    outputs=_outputs,
    triton="fla.modules._shift.engine:token_shift",
    triton_verifier=covers_shift,
)
def token_shift(
    x: Tensor,
    cu_seqlens: Tensor | None = None,
    cache: Tensor | None = None,
    output_cache: bool = False,
    chunk_indices: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``y[t] = x[t - 1] - x[t]`` in every sequence, in the dtype of ``x``.

    Args:
        x: ``[B, T, D]``.
        cu_seqlens: boundaries ``[N + 1]`` of sequences packed into one row (``B = 1``); empty sequences are allowed.
        cache: ``[N, D]``, the token before the first one of each sequence; zeros when None. Not changed.
        output_cache: return the last token of every sequence ``[N, D]`` too (of an empty one, its cache).
        chunk_indices: accepted for callers of the reference package and not needed.

    Returns:
        ``y`` like ``x``, or ``(y, cache_out)`` with ``output_cache``. Both carry gradients.

    Raises:
        ArgumentError: shapes, dtypes or devices that do not fit.
    """
    y, out = TokenShift.apply(x, cu_seqlens, cache, output_cache, chunk_indices)
    return (y, out) if output_cache else y


def token_shift_ref(x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """:func:`token_shift` without a cache, one sequence at a time. For tests."""
    if cu_seqlens is None:
        return torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1] - x if x.shape[1] else x.clone()
    bounds = cu_seqlens.tolist()
    parts = [token_shift_ref(x[:, a:b]) for a, b in itertools.pairwise(bounds)]
    return torch.cat(parts, 1)
