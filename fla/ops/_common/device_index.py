# SPDX-License-Identifier: MIT
"""Chunk tables of packed sequences, built on the device: no synchronisation, safe under CUDA graph capture."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fla.ops._common.kernels import chunk_table_kernel
from fla.ops._common.launch import Launcher

_table = Launcher(chunk_table_kernel)


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
    chunks = _most_chunks(length, n, chunk)
    cu = cu_seqlens.contiguous()
    rows = torch.empty(max(chunks, 1), 4, dtype=torch.int32, device=cu.device)
    offsets = torch.empty(n + 1, dtype=torch.int32, device=cu.device)
    if n > 0:
        block = 128
        _table(
            -(-chunks // block),
            (cu, rows, offsets, n, length, chunks),
            {"C": chunk, "BN": 128, "BC": block},
            {},
            (cu,),
        )
    return ChunkTable(cu, rows, offsets, chunks, n, 0)


def _most_chunks(length: int, sequences: int, chunk: int) -> int:
    # sum of ceil(len / C) <= (T + n (C - 1)) / C
    return max((length + sequences * (chunk - 1)) // chunk, 1) if sequences > 0 else 0


def known_table(length: int, chunk: int, cu: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor) -> ChunkTable:
    """The table of a varlen call from its tensors, as `chunk_table` made them."""
    n = cu.numel() - 1
    return ChunkTable(cu, rows, offsets, _most_chunks(length, n, chunk), n, 0)


def table_size(length: int, chunk: int, sequences: int) -> ChunkTable:
    """What is known of the table of a varlen call without its tensors."""
    return ChunkTable(None, None, None, _most_chunks(length, sequences, chunk), sequences, 0)
