# SPDX-License-Identifier: MIT
"""Offsets and indices of packed sequences.

``cu_seqlens`` is ``[N + 1]``, int32 or int64: sequence n owns the tokens ``cu_seqlens[n] : cu_seqlens[n + 1]``. Results
have its dtype and device. Nothing is remembered between calls, so offsets may be edited in place. Functions that take
``cu_seqlens_cpu``, a copy on the CPU, do not wait for the device when it is given.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from fla.ops._common.checks import ArgumentError

__all__ = [
    "get_max_num_splits",
    "prepare_chunk_indices",
    "prepare_chunk_indices_static",
    "prepare_chunk_offsets",
    "prepare_cu_seqlens_from_lens",
    "prepare_cu_seqlens_from_mask",
    "prepare_lens",
    "prepare_lens_from_mask",
    "prepare_position_ids",
    "prepare_sequence_ids",
    "prepare_split_cu_seqlens",
    "prepare_token_indices",
]


def prepare_lens(cu_seqlens: Tensor) -> Tensor:
    """Lengths ``[N]``."""
    return cu_seqlens.diff()


def prepare_lens_from_mask(mask: Tensor) -> Tensor:
    """Lengths ``[N]``, int32, from a bool mask ``[N, S]`` of the tokens that count."""
    return mask.sum(-1, dtype=torch.int32)


def prepare_cu_seqlens_from_lens(lens: Tensor, dtype: torch.dtype | None = torch.int32) -> Tensor:
    """``cu_seqlens`` from lengths ``[N]``."""
    return torch.nn.functional.pad(lens.cumsum(0, dtype=dtype), (1, 0))


def prepare_cu_seqlens_from_mask(mask: Tensor, dtype: torch.dtype | None = torch.int32) -> Tensor:
    """``cu_seqlens`` from a bool mask ``[N, S]``."""
    return prepare_cu_seqlens_from_lens(prepare_lens_from_mask(mask), dtype)


def prepare_split_cu_seqlens(
    batch_size: int | None = None,
    seq_len: int | None = None,
    split_size: int | None = None,
    cu_seqlens: Tensor | None = None,
    dtype: torch.dtype = torch.int32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Boundaries of pieces of at most `split_size` tokens that never cross a sequence.

    Sequences are those of `cu_seqlens`, or `batch_size` ones of `seq_len` tokens.

    Raises:
        TypeError: no `split_size`, or neither source of lengths.
    """
    if split_size is None:
        raise TypeError("`split_size` must be given.")
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
    elif batch_size is not None and seq_len is not None:
        bounds = [i * seq_len for i in range(batch_size + 1)]
    else:
        raise TypeError("Either `cu_seqlens`, or `batch_size` and `seq_len` must be given.")
    pieces = [i for a, b in itertools.pairwise(bounds) for i in range(a, b, split_size)]
    return torch.tensor([*pieces, bounds[-1]], dtype=dtype, device=device)


def _source(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None) -> Tensor:
    return cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu


def _enumerate(counts: Tensor) -> tuple[Tensor, Tensor]:
    """For ``counts[n]`` items of each n: n, and the number of the item among those of n."""
    owner = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    first = counts.cumsum(0) - counts
    return owner, torch.arange(len(owner), device=counts.device) - first[owner]


def _chunk_counts(cu_seqlens: Tensor, chunk_size: int) -> Tensor:
    return (prepare_lens(cu_seqlens) + (chunk_size - 1)).div(chunk_size, rounding_mode="floor")


def prepare_position_ids(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """Position of each token inside its sequence ``[T]``."""
    return _enumerate(prepare_lens(_source(cu_seqlens, cu_seqlens_cpu)))[1].to(cu_seqlens)


def prepare_sequence_ids(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """Number of each token's sequence ``[T]``, empty sequences not counted."""
    return (prepare_position_ids(cu_seqlens, cu_seqlens_cpu) == 0).cumsum(0, dtype=cu_seqlens.dtype) - 1


def prepare_token_indices(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """``(sequence, position)`` of each token ``[T, 2]``, empty sequences not counted."""
    position = prepare_position_ids(cu_seqlens, cu_seqlens_cpu)
    return torch.stack([(position == 0).cumsum(0, dtype=cu_seqlens.dtype) - 1, position], 1)


def prepare_chunk_indices(cu_seqlens: Tensor, chunk_size: int, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """``(sequence, chunk)`` of each chunk ``[total chunks, 2]``; empty sequences keep their number."""
    pairs = _enumerate(_chunk_counts(_source(cu_seqlens, cu_seqlens_cpu), chunk_size))
    return torch.stack(pairs, 1).to(cu_seqlens)


def prepare_chunk_offsets(cu_seqlens: Tensor, chunk_size: int) -> Tensor:
    """Number of chunks before each sequence, and of all ``[N + 1]``."""
    return prepare_cu_seqlens_from_lens(_chunk_counts(cu_seqlens, chunk_size), cu_seqlens.dtype)


def get_max_num_splits(cu_seqlens: Tensor, chunk_size: int, cu_seqlens_cpu: Tensor | None = None) -> int:
    """Chunks of the longest sequence."""
    counts = _chunk_counts(_source(cu_seqlens, cu_seqlens_cpu), chunk_size)
    return int(counts.max()) if len(counts) else 0


def prepare_chunk_indices_static(cu_seqlens: Tensor, chunk_size: int, nt_max: int) -> tuple[Tensor, Tensor]:
    """:func:`prepare_chunk_indices` with a fixed number of rows, without waiting for the device.

    Returns:
        Chunks ``[nt_max, 2]``, unused rows ``(-1, 0)``, and :func:`prepare_chunk_offsets`.

    Raises:
        ValueError: more than `nt_max` chunks (seen on the CPU only; elsewhere the list is cut).
    """
    offsets = prepare_chunk_offsets(cu_seqlens, chunk_size)
    if offsets.device.type == "cpu" and int(offsets[-1]) > nt_max:
        raise ArgumentError(f"`nt_max` must be at least the number of chunks, {int(offsets[-1])}, got {nt_max}.")
    row = torch.arange(nt_max, dtype=offsets.dtype, device=offsets.device)
    sequence = torch.searchsorted(offsets[1:].contiguous(), row, right=True)
    used = row < offsets[-1]
    number = row - offsets[sequence.clamp(max=max(len(offsets) - 2, 0))]
    pairs = torch.stack([torch.where(used, sequence.to(row), -1), torch.where(used, number, 0)], 1)
    return pairs, offsets
