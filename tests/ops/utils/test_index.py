# SPDX-License-Identifier: MIT
"""Index helpers against loops over sequences."""

from __future__ import annotations

import itertools

import pytest
import torch

from fla.ops.utils import index

CASES = [[0, 15], [0, 0, 16], [0, 5, 5, 70, 200, 200], [0, 1, 2, 3], [0]]


def loops(offsets: list[int], chunk: int) -> dict[str, list]:
    spans = list(itertools.pairwise(offsets))
    filled = [(a, b) for a, b in spans if b > a]
    return {
        "lens": [b - a for a, b in spans],
        "positions": [i for a, b in spans for i in range(b - a)],
        "sequences": [n for n, (a, b) in enumerate(filled) for _ in range(b - a)],
        "chunks": [[n, c] for n, (a, b) in enumerate(spans) for c in range(-(-(b - a) // chunk))],
        "counts": [-(-(b - a) // chunk) for a, b in spans],
    }


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("offsets", CASES)
def test_indices_equal_loops(offsets: list[int], chunk: int, dtype: torch.dtype) -> None:
    cu = torch.tensor(offsets, dtype=dtype)
    want = loops(offsets, chunk)
    positions, sequences = index.prepare_position_ids(cu), index.prepare_sequence_ids(cu)
    chunks = index.prepare_chunk_indices(cu, chunk)
    assert index.prepare_lens(cu).tolist() == want["lens"]
    assert positions.tolist() == want["positions"]
    assert sequences.tolist() == want["sequences"]
    pairs = [list(pair) for pair in zip(want["sequences"], want["positions"], strict=True)]
    assert index.prepare_token_indices(cu).tolist() == pairs
    assert chunks.tolist() == want["chunks"]
    assert index.prepare_chunk_offsets(cu, chunk).tolist() == [sum(want["counts"][:i]) for i in range(len(offsets))]
    assert index.get_max_num_splits(cu, chunk) == max(want["counts"], default=0)
    assert {x.dtype for x in (positions, sequences, chunks, index.prepare_chunk_offsets(cu, chunk))} == {dtype}
    assert torch.equal(index.prepare_chunk_indices(cu, chunk, cu_seqlens_cpu=cu.clone()), chunks)
    total = len(want["chunks"])
    static, table = index.prepare_chunk_indices_static(cu, chunk, total + 3)
    assert static[:total].tolist() == want["chunks"]
    assert static[total:].tolist() == [[-1, 0]] * 3
    assert torch.equal(table, index.prepare_chunk_offsets(cu, chunk))


def test_too_small_a_static_list_is_an_error() -> None:
    with pytest.raises(ValueError, match="nt_max"):
        index.prepare_chunk_indices_static(torch.tensor([0, 100]), 16, 3)


def test_offsets_edited_in_place_give_fresh_indices() -> None:
    cu = torch.tensor([0, 10, 40])
    before = index.prepare_position_ids(cu)
    cu[1] = 20
    assert before.tolist() != index.prepare_position_ids(cu).tolist()
    assert index.prepare_position_ids(cu).tolist() == [*range(20), *range(20)]


def test_offsets_from_lengths_and_masks() -> None:
    mask = torch.tensor([[False, True, True], [True, True, True], [False, False, False]])
    assert index.prepare_lens_from_mask(mask).tolist() == [2, 3, 0]
    cu = index.prepare_cu_seqlens_from_mask(mask)
    assert cu.tolist() == [0, 2, 5, 5]
    assert cu.dtype == torch.int32
    assert index.prepare_cu_seqlens_from_lens(torch.tensor([2, 3]), torch.int64).dtype == torch.int64


@pytest.mark.parametrize("split", [32, 128, 129])
def test_split_offsets_never_cross_a_sequence(split: int) -> None:
    cu = torch.tensor([0, 100, 100, 300])
    pieces = index.prepare_split_cu_seqlens(split_size=split, cu_seqlens=cu).tolist()
    assert set(cu.tolist()) <= set(pieces)
    assert all(0 < b - a <= split for a, b in itertools.pairwise(pieces))
    dense = index.prepare_split_cu_seqlens(2, 150, split).tolist()
    assert dense == index.prepare_split_cu_seqlens(split_size=split, cu_seqlens=torch.tensor([0, 150, 300])).tolist()
    with pytest.raises(TypeError, match="split_size"):
        index.prepare_split_cu_seqlens(2, 150)
    with pytest.raises(TypeError, match="cu_seqlens"):
        index.prepare_split_cu_seqlens(2, split_size=4)
