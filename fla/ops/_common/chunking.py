# SPDX-License-Identifier: MIT
"""Tokens to chunks and back, for the chunked PyTorch engines.

An engine works on ``[M, H, C, ...]``: `M` chunks of `C` tokens. Chunks never straddle sequences. They are ordered by
their number inside the sequence first and by the sequence second, and sequences by descending chunk count, so that the
chunks which one step of the state pass touches lie side by side: step `c` owns the chunks ``starts[c] : starts[c] +
active[c]``, and they belong to the first ``active[c]`` sequences. A dense batch is the case in which all sequences are
equally long. Padding rows are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["ChunkPlan", "host_offsets", "make_plan"]


def host_offsets(cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None = None) -> list[int] | None:
    """Sequence boundaries as Python integers. Waits for the device unless a host copy is given."""
    if cu_seqlens is None:
        return None
    return (cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu).tolist()


@dataclass(frozen=True)
class ChunkPlan:
    """Where each token of a call lies among the chunks. Made by :func:`make_plan`."""

    batch: int  # leading size of the caller's tensors (1 when packed)
    length: int  # T of the caller's tensors
    num_sequences: int  # N
    chunk_size: int  # C
    reverse: bool  # chunks run from the last token to the first
    active: tuple[int, ...]  # active[c]: how many sequences own a chunk number c; never increases
    order: Tensor | None = None  # [N] caller's sequence of each sorted position; None: unchanged
    rank: Tensor | None = None  # [N] inverse of `order`
    slot_token: Tensor | None = None  # [M*C] token of each slot (any valid one for padding); None: dense
    token_slot: Tensor | None = None  # [T] slot of each token; None: dense
    pad_slots: Tensor | None = None  # slots that hold no token; None: there are none, or dense
    starts: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        starts, total = [], 0
        for n in self.active:
            starts.append(total)
            total += n
        object.__setattr__(self, "starts", tuple(starts))

    @property
    def num_chunks(self) -> int:
        """`M`, the number of chunks of all sequences together."""
        return sum(self.active)

    def pack(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """``[B, T, H, ...]`` to a new contiguous ``[M, H, C, ...]`` of `dtype`, zero in padding. Differentiable."""
        return _Pack.apply(x, self, dtype)

    def unpack(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """``[M, H, C, ...]`` to a new ``[B, T, H, ...]`` of `dtype`. Differentiable."""
        return _Unpack.apply(x, self, dtype)

    def pack_state(self, state: Tensor) -> Tensor:
        """``[N, ...]`` in the caller's order to the sorted order."""
        return state if self.order is None else state.index_select(0, self.order)

    def unpack_state(self, state: Tensor) -> Tensor:
        """``[N, ...]`` in the sorted order to the caller's order."""
        return state if self.rank is None else state.index_select(0, self.rank)

    def valid(self, device: torch.device) -> Tensor | None:
        """``[M, C]`` bool, False in padding; None when nothing is padded."""
        if self.slot_token is None:
            rest = self.length % self.chunk_size
            if rest == 0:
                return None
            mask = torch.ones(len(self.active), self.batch, self.chunk_size, dtype=torch.bool, device=device)
            mask[-1, :, rest:] = False
            return mask.flatten(0, 1)
        if self.pad_slots is None:
            return None
        mask = torch.ones(self.num_chunks * self.chunk_size, dtype=torch.bool, device=device)
        return mask.index_fill_(0, self.pad_slots, False).unflatten(0, (-1, self.chunk_size))

    def _pack(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        C, feature = self.chunk_size, x.shape[2:]
        out = torch.empty(self.num_chunks, feature[0], C, *feature[1:], dtype=dtype, device=x.device)
        by_row = out.transpose(1, 2)  # [M, C, H, ...]
        if self.slot_token is not None:
            by_row.copy_(x[0].index_select(0, self.slot_token).unflatten(0, (-1, C)))
            if self.pad_slots is not None:
                by_row[self.pad_slots // C, self.pad_slots % C] = 0
            return out
        if self.reverse:
            x = x.flip(1)
        by_row = by_row.unflatten(0, (len(self.active), self.batch))  # [NT, B, C, H, ...]
        full, rest = divmod(self.length, C)
        if full:
            by_row[:full].copy_(x[:, : full * C].unflatten(1, (full, C)).transpose(0, 1))
        if rest:
            by_row[full, :, :rest].copy_(x[:, full * C :])
            by_row[full, :, rest:] = 0
        return out

    def _unpack(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        C, feature = self.chunk_size, (x.shape[1], *x.shape[3:])
        by_row = x.transpose(1, 2)
        if self.token_slot is not None:
            return by_row.flatten(0, 1).index_select(0, self.token_slot).to(dtype).unsqueeze(0)
        out = torch.empty(self.batch, self.length, *feature, dtype=dtype, device=x.device)
        by_row = by_row.unflatten(0, (len(self.active), self.batch))
        full, rest = divmod(self.length, C)
        if full:
            out[:, : full * C].unflatten(1, (full, C)).copy_(by_row[:full].transpose(0, 1))
        if rest:
            out[:, full * C :].copy_(by_row[full, :, :rest])
        return out.flip(1) if self.reverse else out


def make_plan(
    batch: int,
    length: int,
    chunk_size: int,
    device: torch.device,
    offsets: Sequence[int] | None = None,
    reverse: bool = False,
) -> ChunkPlan:
    """The plan of a call with tensors ``[batch, length, ...]``.

    `offsets` are the sequence boundaries of a packed call (`batch` is 1), already checked: they start at 0, never
    decrease, and rows from ``offsets[-1]`` on belong to no sequence (they must not exist for `unpack` to be complete).
    """
    C = chunk_size
    if offsets is None:
        return ChunkPlan(batch, length, batch, C, reverse, (batch,) * (-(-length // C)))
    bounds = torch.tensor(offsets, dtype=torch.int64)
    lens = bounds.diff()
    counts = (lens + C - 1) // C
    order = torch.argsort(counts, descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    steps = int(counts.max()) if len(order) else 0
    active = (counts.unsqueeze(0) > torch.arange(steps).unsqueeze(1)).sum(1)
    starts = active.cumsum(0) - active
    seq = torch.repeat_interleave(torch.arange(len(order)), counts)
    number = torch.arange(len(seq)) - (counts.cumsum(0) - counts)[seq]
    place = starts[number] + rank[seq]
    owner, number_at = torch.empty_like(seq), torch.empty_like(seq)
    owner[place], number_at[place] = seq, number
    position = number_at.unsqueeze(1) * C + torch.arange(C)  # [M, C] position inside the sequence
    inside = position < lens[owner].unsqueeze(1)
    begin, end = bounds[owner].unsqueeze(1), bounds[owner + 1].unsqueeze(1)
    token = torch.where(inside, end - 1 - position if reverse else begin + position, begin).flatten()
    slots = torch.arange(len(token))
    used = inside.flatten()
    token_slot = torch.empty(length, dtype=torch.int64)
    token_slot[token[used]] = slots[used]
    pad = slots[~used]
    return ChunkPlan(
        batch,
        length,
        len(order),
        C,
        reverse,
        tuple(active.tolist()),
        order=order.to(device),
        rank=rank.to(device),
        slot_token=token.to(device),
        token_slot=token_slot.to(device),
        pad_slots=pad.to(device) if len(pad) else None,
    )


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: ChunkPlan, dtype: torch.dtype) -> Tensor:
        ctx.plan, ctx.dtype = plan, x.dtype
        return plan._pack(x, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _Unpack.apply(grad, ctx.plan, ctx.dtype), None, None


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: ChunkPlan, dtype: torch.dtype) -> Tensor:
        ctx.plan, ctx.dtype = plan, x.dtype
        return plan._unpack(x, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _Pack.apply(grad, ctx.plan, ctx.dtype), None, None
