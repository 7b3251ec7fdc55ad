# SPDX-License-Identifier: MIT
"""Where sequences and chunks lie. Nothing here waits for the device."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from fla.ops._common.device_index import ChunkTable, chunk_table
from fla_backend_tilelang.programs import blank


def _rows(device: torch.device, batch: int, length: int, per: int, chunk: int) -> Tensor:
    at = torch.arange(per, dtype=torch.int32, device=device) * chunk
    sizes = (length - at).clamp(max=chunk)
    rows = at + torch.arange(batch, dtype=torch.int32, device=device)[:, None] * length
    unread = torch.zeros_like(rows)
    return torch.stack([rows, sizes.expand_as(rows), unread, unread], -1).view(-1, 4)


@functools.lru_cache(maxsize=256)
def _kept(device: torch.device, *sizes: int) -> Tensor:
    # Copied from the host, which waits: calls on other streams may use it at once.
    return _rows(torch.device("cpu"), *sizes).to(device)


def _batch_table(device: torch.device, *sizes: int) -> Tensor:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # A graph's own: what it holds before the first replay must not be kept for other calls.
        return _rows(device, *sizes)
    return _kept(device, *sizes)


@dataclass(frozen=True)
class Tokens:
    """Sequences of a call in chunks: a batch of equal ones, or packed ones by device-side tables."""

    length: int
    sequences: int
    chunks: int
    chunk: int
    ragged: bool
    found: ChunkTable | None
    cu: Tensor | None

    @classmethod
    def of(cls, batch: int, length: int, chunk: int, cu_seqlens: Tensor | None, step: int | None = None) -> Tokens:
        """`chunk`: of the first stage; `step`: of the pass over time, where that is less."""
        if cu_seqlens is None:
            return cls(length, batch, batch * -(-length // chunk), chunk, length % (step or chunk) != 0, None, None)
        found = chunk_table(batch, length, chunk, cu_seqlens)
        return cls(length, found.sequences, found.chunks, chunk, True, found, cu_seqlens.to(torch.int32).contiguous())

    @property
    def packed(self) -> bool:
        return self.found is not None

    @property
    def empty(self) -> bool:
        return self.length == 0 or self.sequences == 0

    def table(self, device: torch.device) -> Tensor:
        """``[chunks, 4]``: first row, valid rows, sequence, chunk in it."""
        if self.found is None or self.found.rows is None:
            return _batch_table(device, self.sequences, self.length, self.chunks // self.sequences, self.chunk)
        return self.found.rows

    def cuts(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """First tokens and first chunks of the sequences, ``[N + 1]`` each; not read for a batch."""
        if self.found is None or self.found.offsets is None or self.cu is None:
            return blank(device, torch.int32, 2), blank(device, torch.int32, 2)
        return self.cu, self.found.offsets
