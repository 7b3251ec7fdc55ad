# SPDX-License-Identifier: MIT
"""Buffers in one allocation: apart, aligned, of their own shapes and types."""

from __future__ import annotations

import pytest
import torch

from fla.ops._common.room import carve, room_for


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_buffers_lie_apart_and_on_boundaries(dtype) -> None:
    parts = (((3, 5), dtype), ((0, 4), dtype), ((2, 2, 65), torch.float32), ((7,), torch.int32))
    room = room_for(parts, torch.empty(1, dtype=dtype))
    assert room.dtype == dtype
    assert room.is_contiguous()
    views = carve(room, parts)
    assert [(v.shape, v.dtype) for v in views] == [(torch.Size(s), d) for s, d in parts]
    for i, v in enumerate(views):
        assert v.is_contiguous()
        assert not v.numel() or (v.data_ptr() - room.data_ptr()) % 512 == 0
        v.fill_(i + 1)
    assert all((v == i + 1).all() for i, v in enumerate(views))
    again = carve(room, parts)
    assert [v.data_ptr() for v in again] == [v.data_ptr() for v in views]


def test_memory_of_nan_is_nan_in_every_part() -> None:
    room = room_for((((4, 4), torch.bfloat16), ((3,), torch.float32)), torch.empty(1, dtype=torch.bfloat16))
    assert all(
        v.isnan().all() for v in carve(room.fill_(float("nan")), (((4, 4), torch.bfloat16), ((3,), torch.float32)))
    )
