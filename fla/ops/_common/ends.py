# SPDX-License-Identifier: MIT
"""Where sequences begin and end, for ops that look one token back."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from fla.ops._common.varlen import host_offsets

__all__ = ["first_and_last", "the_token_before"]


def first_and_last(
    T: int,
    device: torch.device,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """First and last tokens, in the direction of the run, of the sequences that have any, and which those are (None
    without offsets: all)."""
    offsets = (0, T) if cu_seqlens is None else host_offsets(cu_seqlens, cu_seqlens_cpu)
    spans = [(n, a, b - 1) for n, (a, b) in enumerate(itertools.pairwise(offsets)) if b > a]
    live, first, last = (torch.tensor([span[i] for span in spans], dtype=torch.int64, device=device) for i in range(3))
    if reverse:
        first, last = last, first
    return first, last, None if cu_seqlens is None else live


def the_token_before(x: Tensor, start: Tensor | None, fill: float, first: Tensor, live: Tensor | None) -> Tensor:
    """``x [B, T, ...]`` one token later; first tokens get ``start [N, ...]``, or ``fill`` if that is None.

    ``first`` and ``live`` are those of `first_and_last`.
    """
    moved = x.roll(1, 1)
    if start is None or not len(first):
        return moved.index_fill(1, first, fill)
    rows = start if live is None else start.index_select(0, live)
    return moved.index_copy(1, first, rows.view(x.shape[0], len(first), *x.shape[2:]))
