# SPDX-License-Identifier: MIT
"""Chunk tables of packed sequences, built on the device: no synchronisation, safe under CUDA graph capture."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["N", "T", "NT"])
def chunk_table_kernel(cu, table, offsets, N, T, NT, C: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr):
    pid = tl.program_id(0)
    c = pid * BC + tl.arange(0, BC)
    seq = tl.zeros((BC,), tl.int32)
    base = tl.zeros((BC,), tl.int32)
    total = tl.zeros((), tl.int32)
    # Every program counts all sequences afresh: cheaper than a second launch for the prefix sums.
    for n0 in range(0, N, BN):
        n = n0 + tl.arange(0, BN)
        m = n < N
        bos = tl.minimum(tl.maximum(tl.load(cu + n, mask=m, other=0).to(tl.int32), 0), T)
        eos = tl.minimum(tl.maximum(tl.load(cu + n + 1, mask=m, other=0).to(tl.int32), 0), T)
        count = tl.where(m, (tl.maximum(eos - bos, 0) + C - 1) // C, 0)
        end = total + tl.cumsum(count, 0)
        tl.store(offsets + n + 1, end, mask=m & (pid == 0))
        done = (end[None, :] <= c[:, None]) & m[None, :]
        seq += tl.sum(done.to(tl.int32), 1)
        base = tl.maximum(base, tl.max(tl.where(done, end[None, :], 0), 1))
        total += tl.sum(count, 0)
    if pid == 0:
        tl.store(offsets, 0)
    used = c < total
    i = tl.minimum(seq, N - 1)
    bos = tl.minimum(tl.maximum(tl.load(cu + i).to(tl.int32), 0), T)
    eos = tl.minimum(tl.maximum(tl.load(cu + i + 1).to(tl.int32), 0), T)
    at = (c - base) * C
    ok = c < NT
    tl.store(table + c * 4, tl.where(used, bos + at, 0), mask=ok)
    tl.store(table + c * 4 + 1, tl.where(used, tl.minimum(eos - bos - at, C), 0), mask=ok)
    tl.store(table + c * 4 + 2, tl.where(used, seq, -1), mask=ok)
    tl.store(table + c * 4 + 3, tl.where(used, c - base, 0), mask=ok)


@dataclass(frozen=True)
class ChunkTable:
    """Where the chunks of a call lie.

    Dense calls (``cu is None``) need no table: chunk ``b * chunks_per_sequence + t`` starts at row ``b * T + t * C``.

    Attributes:
        cu: the caller's ``cu_seqlens`` or None.
        rows: int32 `[chunks, 4]` on the device: first row, valid rows (0: unused), sequence (-1:
            unused), chunk in sequence.
        offsets: int32 `[sequences + 1]`: chunks before each sequence.
        chunks: an upper bound of the number of chunks, known without reading ``cu``; launch this many.
        sequences: number of sequences.
        per_sequence: chunks of each sequence in dense calls, 0 in varlen.
    """

    cu: torch.Tensor | None
    rows: torch.Tensor | None
    offsets: torch.Tensor | None
    chunks: int
    sequences: int
    per_sequence: int

    @property
    def varlen(self) -> bool:
        return self.cu is not None


def chunk_table(batch: int, length: int, chunk: int, cu_seqlens: torch.Tensor | None = None) -> ChunkTable:
    """The chunk table of a call over `[batch, length]` tokens.

    A varlen table is rebuilt on every call (one launch): a cache keyed by tensor identity goes stale when the tensor is
    written in place.
    """
    if cu_seqlens is None:
        per = -(-length // chunk)
        return ChunkTable(None, None, None, batch * per, batch, per)
    n = cu_seqlens.numel() - 1
    # sum of ceil(len / C) <= (T + n (C - 1)) / C
    chunks = max((length + n * (chunk - 1)) // chunk, 1) if n > 0 else 0
    cu = cu_seqlens.contiguous()
    rows = torch.empty(max(chunks, 1), 4, dtype=torch.int32, device=cu.device)
    offsets = torch.empty(n + 1, dtype=torch.int32, device=cu.device)
    if n > 0:
        block = 128
        chunk_table_kernel[(-(-chunks // block),)](cu, rows, offsets, n, length, chunks, C=chunk, BN=128, BC=block)
    return ChunkTable(cu, rows, offsets, chunks, n, 0)
