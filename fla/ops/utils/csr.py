# SPDX-License-Identifier: MIT
"""Selected blocks seen from the blocks: which queries chose each."""

from __future__ import annotations

import torch
from torch import Tensor

from fla.ops._common import checks
from fla.ops._common.checks import ArgumentError
from fla.ops.utils.index import prepare_chunk_offsets, prepare_lens, prepare_position_ids

__all__ = ["prepare_block_csr"]


def prepare_block_csr(
    block_indices: Tensor,
    block_counts: Tensor | int,
    cu_seqlens: Tensor | None,
    chunk_indices: Tensor | None,
    num_blocks: int,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """For each batch, head and block the queries that selected it, as a compressed list of rows.

    Args:
        block_indices: blocks that each query selects ``[B, T, H, S]``, numbered inside its sequence.
        block_counts: how many of the S entries of a query count: one number, or ``[B, T, H]``.
        cu_seqlens: boundaries of packed sequences ``[N + 1]``; B must be 1. Blocks of sequence n are then numbered
            from the number of blocks before it.
        chunk_indices: what a launch on a GPU may be given; without effect on the result.
        num_blocks: blocks of a row of the batch; of all sequences together when packed.
        block_size: tokens per block.

    Returns:
        Queries ``b * T + t`` of all lists one after the other, and where the list of ``(b, h, block)`` begins
        ``[B * H * num_blocks + 1]``, both int32. Entries that are negative, not below the number of blocks, beyond the
        count of their query, or blocks that begin after their query are left out. Queries of a list ascend.

    Raises:
        ValueError: shapes that do not fit, a block size below 1.
    """
    sizes = checks.check_shapes(block_indices=(block_indices, "B T H S"))
    B, T, H, S = (sizes[n] for n in "BTHS")
    if block_size < 1:
        raise ArgumentError(f"`block_size` must be at least 1, got {block_size}.")
    device = block_indices.device
    slot = torch.arange(S, device=device)
    if isinstance(block_counts, Tensor):
        checks.check_shapes(sizes, block_counts=(block_counts, "B T H"))
        counted = slot < block_counts.unsqueeze(-1)
    else:
        counted = (slot < block_counts).expand(B, T, H, S)
    checks.check_varlen(cu_seqlens, None, B, T)
    index = block_indices.to(torch.int64)
    if cu_seqlens is None:
        position, before = torch.arange(T, device=device), torch.zeros(T, dtype=torch.int64, device=device)
    else:
        position = prepare_position_ids(cu_seqlens).to(torch.int64)
        offsets = prepare_chunk_offsets(cu_seqlens, block_size)[:-1].to(torch.int64)
        before = offsets.repeat_interleave(prepare_lens(cu_seqlens))
    row = lambda x: x.view(1, -1, 1, 1)
    block = index + row(before)
    used = counted & (index >= 0) & (block < num_blocks) & (index * block_size <= row(position))
    b, t, h, _ = used.nonzero(as_tuple=True)
    key = (b * H + h) * num_blocks + block[used]
    lists = B * H * num_blocks
    offsets = torch.nn.functional.pad(torch.bincount(key, minlength=lists).cumsum(0), (1, 0))
    order = key.argsort(stable=True)
    return (b * T + t)[order].to(torch.int32), offsets.to(torch.int32)
