# SPDX-License-Identifier: MIT
"""Where tokens go: sequence offsets on the host, and padded chunks of fixed-length or packed sequences.

A plan orders chunks by step: first the first chunk of every sequence, then the second of those that have one, and so
on, longest sequence first. The chunks of one step are therefore consecutive and belong to a prefix of the (sorted)
states, so an engine walks all sequences at once, without padding short sequences to the longest.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fla.ops._common.single import unbatched

_on_host: dict[int, tuple[weakref.ref[Tensor], int, tuple[int, ...]]] = {}


def host_offsets(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None = None) -> tuple[int, ...]:
    """Sequence offsets as Python integers.

    CPU tensors are read afresh on every call. A device tensor is copied once and again after every in-place change
    (changes through ``.data`` are invisible: pass ``cu_seqlens_cpu``, which also saves the copy).
    """
    source = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    if source.device.type == "cpu" or source.is_inference():
        return tuple(source.tolist())
    key, version = id(source), source._version
    entry = _on_host.get(key)
    if entry is not None and entry[0]() is source and entry[1] == version:
        return entry[2]
    offsets = tuple(source.tolist())
    _on_host[key] = (weakref.ref(source, lambda _: _on_host.pop(key, None)), version, offsets)
    return offsets


class _Gather(torch.autograd.Function):
    """``x[index]`` along axis 0 for a one-to-one index; -1 stands for a row of zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(index, inverse)
        return _take(x, index)

    @staticmethod
    @unbatched
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        index, inverse = ctx.saved_tensors
        return _Gather.apply(dy, inverse, index), None, None


def _take(x: Tensor, index: Tensor) -> Tensor:
    if x.shape[0] == 0:
        return x.new_zeros(index.shape[0], *x.shape[1:])
    missing = index < 0
    y = x.index_select(0, index.clamp(min=0))
    return y.masked_fill_(missing.view(-1, *(1,) * (x.dim() - 1)), 0)


@dataclass(frozen=True, eq=False)
class ChunkPlan:
    """Chunks of ``chunk`` tokens in step order; see the module docstring.

    Attributes:
        chunk: tokens per chunk.
        tokens: tokens of the inputs, ``T``.
        steps: number of chunks, and so of active sequences, in each step; never increasing.
        sequences: number of sequences, ``N``.
        order: sequence at each place of the sorted states, or None when they keep their order.
        place: place of each sequence among the sorted states, or None.
        index: token of each packed row ``[M * chunk]``, -1 for padding; None for fixed lengths.
        inverse: packed row of each token ``[T]``, -1 for tokens of no sequence; None for fixed lengths.
        by_sequence: row in step order of the chunks in sequence order ``[M]``; None for fixed lengths.
    """

    chunk: int
    tokens: int
    steps: tuple[int, ...]
    sequences: int
    order: Tensor | None = None
    place: Tensor | None = None
    index: Tensor | None = None
    inverse: Tensor | None = None
    by_sequence: Tensor | None = None

    @property
    def chunks(self) -> int:
        """Number of chunks of all sequences, ``M``."""
        return sum(self.steps)

    def pack(self, x: Tensor) -> Tensor:
        """``[B, T, ...]`` as zero-padded chunks ``[M, chunk, ...]``; differentiable."""
        rest = x.shape[2:]
        if self.index is not None and self.inverse is not None:
            return _Gather.apply(x[0], self.index, self.inverse).view(self.chunks, self.chunk, *rest)
        B, T = x.shape[:2]
        NT = len(self.steps)
        if (padding := NT * self.chunk - T) > 0:
            x = torch.nn.functional.pad(x, (0, 0) * len(rest) + (0, padding))
        return x.reshape(B, NT, self.chunk, *rest).transpose(0, 1).reshape(NT * B, self.chunk, *rest)

    def unpack(self, y: Tensor) -> Tensor:
        """Chunks ``[M, chunk, ...]`` back to ``[B, T, ...]``; tokens of no sequence are zero; differentiable."""
        if self.index is not None and self.inverse is not None:
            return _Gather.apply(y.flatten(0, 1), self.inverse, self.index).unsqueeze(0)
        rest = y.shape[2:]
        B, NT = self.sequences, len(self.steps)
        y = y.reshape(NT, B, self.chunk, *rest).transpose(0, 1).reshape(B, NT * self.chunk, *rest)
        return y[:, : self.tokens].contiguous()

    def sort_states(self, state: Tensor) -> Tensor:
        """States ``[N, ...]`` in the order of the plan."""
        return state if self.order is None else state.index_select(0, self.order)

    def unsort_states(self, state: Tensor) -> Tensor:
        """States in the order of the plan back in the order of the sequences."""
        return state if self.place is None else state.index_select(0, self.place)

    def chunk_states(self, h: Tensor) -> Tensor:
        """States per chunk ``[M, ...]`` as ``[B, NT, ...]``, or ``[1, M, ...]`` in sequence order for packed inputs."""
        if self.by_sequence is not None:
            return h.index_select(0, self.by_sequence).unsqueeze(0)
        return h.view(len(self.steps), self.sequences, *h.shape[1:]).transpose(0, 1)


@functools.lru_cache(maxsize=16)
def _packed_plan(offsets: tuple[int, ...], T: int, chunk: int, device: torch.device) -> ChunkPlan:
    # An ordinary tensor even when first asked for in inference mode: the plan is kept for later calls. Made on the CPU
    # whatever the default device is, as its sizes are read.
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        bounds = torch.tensor(offsets, dtype=torch.int64)
        start, length = bounds[:-1], bounds[1:] - bounds[:-1]
        counts = (length + (chunk - 1)) // chunk
        order = torch.argsort(counts, descending=True, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        longest = int(counts.max())
        # A chunk is (sequence, number in sequence); sorting by (number, place) gives step order.
        sequence = torch.repeat_interleave(torch.arange(len(counts)), counts)
        number = torch.arange(len(sequence)) - (counts.cumsum(0) - counts)[sequence]
        by_step = torch.argsort(number * len(counts) + place[sequence])
        by_sequence = torch.empty_like(by_step)
        by_sequence[by_step] = torch.arange(len(by_step))
        steps = torch.bincount(number, minlength=longest).tolist() if len(number) else []
        sequence, number = sequence[by_step], number[by_step]
        offset = number[:, None] * chunk + torch.arange(chunk)
        index = torch.where(offset < length[sequence, None], start[sequence, None] + offset, -1).flatten()
        inverse = torch.full((T,), -1, dtype=torch.int64)
        rows = torch.nonzero(index >= 0).flatten()
        inverse[index[rows]] = rows
        order, place, index, inverse, by_sequence = (
            x.to(device, non_blocking=True) for x in (order, place, index, inverse, by_sequence)
        )
    return ChunkPlan(chunk, T, tuple(steps), len(offsets) - 1, order, place, index, inverse, by_sequence)


def plan_chunks(
    B: int,
    T: int,
    chunk: int,
    device: torch.device,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> ChunkPlan:
    """Plan the chunks of ``B`` sequences of ``T`` tokens, or of the packed sequences of ``cu_seqlens``.

    Plans of packed sequences are kept by the content of the offsets, so layers of one model share them and an offset
    tensor that is edited in place gives fresh results.
    """
    if cu_seqlens is None:
        return ChunkPlan(chunk, T, (B,) * (-(-T // chunk)), B)
    return _packed_plan(host_offsets(cu_seqlens, cu_seqlens_cpu), T, chunk, device)


def longest_sequence(T: int, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None) -> int:
    """Length of the longest sequence."""
    if cu_seqlens is None:
        return T
    offsets = host_offsets(cu_seqlens, cu_seqlens_cpu)
    return max(b - a for a, b in itertools.pairwise(offsets))
