# SPDX-License-Identifier: MIT
"""Allocations of the engines: several buffers in one, what a forward pass keeps for its backward pass."""

from __future__ import annotations

import math

import torch
from torch import Tensor

Parts = tuple[tuple[tuple[int, ...], torch.dtype], ...]

# Parts begin where the caching allocator would begin a block.
_ALIGN = 512


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, int]:
    """Of a part: what it holds, and up to where the next one begins."""
    size = math.prod(shape) * dtype.itemsize
    return size, -(-size // _ALIGN) * _ALIGN


def like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised contiguous tensor of the shape of ``x``, on its device.

    Not ``torch.empty_like``: on the meta device, where first calls are walked through, that imports sympy.
    """
    return torch.empty(x.shape, dtype=x.dtype if dtype is None else dtype, device=x.device)


def total(x: Tensor, *axes: int) -> Tensor:
    """``x.sum(axes)``, which on the meta device imports torch's compiler."""
    if x.is_meta:
        return torch.empty([n for i, n in enumerate(x.shape) if i not in axes], dtype=x.dtype, device=x.device)
    return x.sum(axes)


def room_for(parts: Parts, like: Tensor) -> Tensor:
    """Uninitialised memory for buffers of these shapes and types, on the device of ``like`` and in its type."""
    return like.new_empty(sum(_bytes(*part)[1] for part in parts) // like.dtype.itemsize)


def carve(room: Tensor, parts: Parts) -> list[Tensor]:
    """The buffers in ``room``."""
    found, start, item = [], 0, room.dtype.itemsize
    for shape, dtype in parts:
        size, step = _bytes(shape, dtype)
        found.append(room[start // item : (start + size) // item].view(dtype).view(shape))
        start += step
    return found
