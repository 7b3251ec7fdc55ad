# SPDX-License-Identifier: MIT
"""Rotation of channel pairs by angles that grow with the position (RoPE, https://arxiv.org/abs/2104.09864)."""

from __future__ import annotations

import torch
from torch import Tensor

from fla.backends import CallFacts, dispatch
from fla.modules._covers import covers_rotary, covers_rotary_pair
from fla.modules._dtype import upcast
from fla.ops._common.checks import ArgumentError

__all__ = ["rotary_embedding", "rotary_embedding_fwdbwd", "rotary_embedding_ref", "rotate_half"]


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """``(a, b) -> (-b, a)`` for the two halves of the last axis or, interleaved, for every pair of neighbours."""
    if interleaved:
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((-b, a), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def _spread(table: Tensor, interleaved: bool) -> Tensor:
    """``[..., R]`` to ``[..., 1, 2R]``: one entry for each channel of a pair, all heads alike."""
    table = table.repeat_interleave(2, -1) if interleaved else torch.cat((table, table), -1)
    return table.unsqueeze(-2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The first ``2R`` channels of ``x`` ``[B, T, H, D]`` in float32; tables ``[(B,) T, R]``."""
    x = upcast(x[..., : 2 * cos.shape[-1]])
    cos, sin = (_spread(t.to(x.dtype), interleaved) for t in (cos, sin))
    return x * cos + rotate_half(x, interleaved) * sin


def rotary_embedding_ref(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate ``x`` ``[B, T, H, D]`` by the first `T` rows of the tables ``[TR, R]``; channels from ``2R`` on stay."""
    T, R = x.shape[1], cos.shape[-1]
    return torch.cat((_rotate(x, cos[:T], sin[:T], interleaved).to(x.dtype), x[..., 2 * R :]), -1)


_FACTS = CallFacts(tensors=("x",), key="x", value="x", initial_state=None, state_v_first=None)


def _check(x: Tensor, cos: Tensor, sin: Tensor, seqlen_offsets: int | Tensor, cu_seqlens: Tensor | None) -> None:
    offsets = seqlen_offsets
    if x.dim() != 4:
        raise ArgumentError(f"`x` must have shape [B, T, H, D], got {list(x.shape)}.")
    B, T, _, D = x.shape
    if cos.dim() != 2 or cos.shape != sin.shape:
        raise ArgumentError(
            f"`cos` and `sin` must have the same shape [TR, R], got {list(cos.shape)} and {list(sin.shape)}."
        )
    if 2 * cos.shape[1] > D:
        raise ArgumentError(f"`cos` must have at most D / 2 = {D // 2} columns, got {cos.shape[1]}.")
    if not cos.dtype == sin.dtype == x.dtype:
        raise ArgumentError(f"`cos` and `sin` must have the dtype of `x`, {x.dtype}, got {cos.dtype} and {sin.dtype}.")
    if not cos.device == sin.device == x.device:
        raise ArgumentError(
            f"`cos` and `sin` must be on the device of `x`, {x.device}, got {cos.device} and {sin.device}."
        )
    if cu_seqlens is not None and (cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or B != 1):
        raise ArgumentError(
            f"`cu_seqlens` must have shape [N + 1] and go with x of one row, got {list(cu_seqlens.shape)} and B = {B}."
        )
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    if isinstance(offsets, Tensor) and (offsets.shape != (N,) or offsets.dtype not in (torch.int32, torch.int64)):
        raise ArgumentError(
            f"`seqlen_offsets` must be an int or an int32 or int64 tensor [{N}], "
            f"got {offsets.dtype} {list(offsets.shape)}."
        )
    if cu_seqlens is None and isinstance(offsets, int) and T + offsets > len(cos):
        raise ArgumentError(f"`cos` must have a row for each of {T + offsets} positions, got {len(cos)}.")


def _positions(x: Tensor, offsets: int | Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Position of every token within its sequence plus the offset: ``[T]``, or ``[B, T]`` with offsets by row."""
    index = torch.arange(x.shape[1], device=x.device)
    if cu_seqlens is None:
        return index + (offsets.to(x.device)[:, None] if isinstance(offsets, Tensor) else offsets)
    cu_seqlens = cu_seqlens.to(x.device)
    sequence = torch.searchsorted(cu_seqlens[1:-1].contiguous(), index.to(cu_seqlens.dtype), right=True)
    offset = offsets.to(x.device)[sequence] if isinstance(offsets, Tensor) else offsets
    return index - cu_seqlens[sequence] + offset


def _rotated(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor,
    cu_seqlens: Tensor | None,
    interleaved: bool,
    inplace: bool,
    conjugate: bool,
) -> Tensor:
    cos, sin = cos.detach(), sin.detach()
    if conjugate:
        sin = -sin
    R = cos.shape[-1]
    position = _positions(x, seqlen_offsets, cu_seqlens)
    # On the CPU a wrong position raises here, on a GPU the gather's own assertion catches it.
    if position.numel() and position.device.type == "cpu" and not torch.compiler.is_compiling():
        last = int(position.max())
        if last >= len(cos):
            raise ArgumentError(f"`cos` must have a row for each of {last + 1} positions, got {len(cos)}.")
    row = position.clamp(min=0)
    rotated = _rotate(x, cos[row], sin[row], interleaved).to(x.dtype)
    # Positions before the first token are left padding.
    valid = (position >= 0)[..., None, None]
    if inplace:
        part = x[..., : 2 * R]
        part.copy_(torch.where(valid, rotated, part))
        return x
    return torch.cat((torch.where(valid, rotated, torch.zeros_like(rotated)), x[..., 2 * R :]), -1)


@dispatch(
    "modules",
    facts=_FACTS,
    validate=_check,
    triton="fla.modules.rotary.engine:rotary_embedding_fwdbwd",
    triton_verifier=covers_rotary,
)
def rotary_embedding_fwdbwd(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """:func:`rotary_embedding`, or with ``conjugate`` the rotation back, which is also its gradient."""
    return _rotated(x, cos, sin, seqlen_offsets, cu_seqlens, interleaved, inplace, conjugate)


@dispatch(
    "modules",
    facts=_FACTS,
    validate=_check,
    triton="fla.modules.rotary.engine:rotary_embedding",
    triton_verifier=covers_rotary,
)
def rotary_embedding(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """Rotate the first ``2R`` channels of every head; the others stay. Computed in float32.

    Channels `i` and ``i + R`` (interleaved: ``2i`` and ``2i + 1``) make the pair `i`, which
    ``(a, b) -> (a cos - b sin, a sin + b cos)`` turns.

    Args:
        x: ``[B, T, H, D]``; the only argument with a gradient.
        cos, sin: tables ``[TR, R]`` in the dtype of `x`, one row for each position.
        interleaved: pair neighbours instead of halves.
        inplace: write into `x`.
        seqlen_offsets: added to the positions, one int or int32 or int64 ``[N]``.
        cu_seqlens: boundaries ``[N + 1]`` of packed sequences, at each of which positions start again.
        chunk_indices: ignored.

    Returns:
        The rotated tensor. At negative positions, which left padding has, the ``2R`` channels are 0, and in place they
        stay as they are.

    Raises:
        ArgumentError: shapes, dtypes or boundaries that do not fit, or a position without a row in the tables (where
            that needs a look at tensors, on the CPU only; the Triton kernel makes the token's ``2R`` channels NaN).
    """
    return _rotated(x, cos, sin, seqlen_offsets, cu_seqlens, interleaved, inplace, False)


def _check_pair(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor,
    sin_k: Tensor,
    seqlen_offsets: int | Tensor,
    cu_seqlens: Tensor | None,
) -> None:
    _check(q, cos, sin, seqlen_offsets, cu_seqlens)
    if k.dim() != 4 or k.shape[:2] != q.shape[:2] or k.shape[3] != q.shape[3]:
        raise ArgumentError(
            f"`k` must have shape [B, T, HK, D] with B, T and D of `q`, {list(q.shape)}, got {list(k.shape)}."
        )
    if k.dtype != q.dtype or k.device != q.device:
        raise ArgumentError(f"`k` must have dtype and device of `q`, {q.dtype} {q.device}, got {k.dtype} {k.device}.")
    if cos_k.shape != cos.shape or sin_k.shape != cos.shape:
        raise ArgumentError(f"`cos_k` and `sin_k` must have the shape of `cos`, {list(cos.shape)}.")


@dispatch(
    "modules",
    facts=CallFacts(tensors=("q",), key="q", value="q", initial_state=None, state_v_first=None),
    validate=_check_pair,
    triton="fla.modules.rotary.engine:rotary_pair",
    triton_verifier=covers_rotary_pair,
)
def rotary_pair(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor,
    sin_k: Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`rotary_embedding` of ``q`` ``[B, T, H, D]`` by ``cos`` and ``sin``, and of ``k`` ``[B, T, HK, D]`` by
    ``cos_k`` and ``sin_k``, at once."""
    options = {"interleaved": interleaved, "seqlen_offsets": seqlen_offsets, "cu_seqlens": cu_seqlens}
    return rotary_embedding(q, cos, sin, **options), rotary_embedding(k, cos_k, sin_k, **options)  # type: ignore[arg-type]
