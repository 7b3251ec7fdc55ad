# SPDX-License-Identifier: MIT
"""How the vector-decay kernels are launched: compiled-kernel caches, descriptors, constant operands, type names."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fla.ops._common.launch import Launcher, descriptor
from fla.ops._delta.kernels.vector_grad import vector_grad, vector_scores
from fla.ops._delta.kernels.vector_prep import vector_prep
from fla.ops._delta.kernels.vector_scan import vector_merge, vector_scan, vector_scan_bwd


class _Ordered(Launcher):
    """A launcher that takes constexprs in any order."""

    def __init__(self, fn: Any) -> None:
        super().__init__(fn)
        self.names = tuple(p.name for p in getattr(fn, "params", ()) if p.is_constexpr)

    def __call__(
        self,
        grid: int,
        args: tuple[Any, ...],
        meta: dict[str, Any],
        options: dict[str, Any],
        given: tuple[Tensor | None, ...] | None = None,
    ) -> None:
        # The interpreter's functions have no parameters to look at.
        super().__call__(grid, args, {name: meta[name] for name in self.names} or meta, options, given)


run_prep, run_scan, run_scan_bwd = _Ordered(vector_prep), _Ordered(vector_scan), _Ordered(vector_scan_bwd)
run_merge, run_scores, run_grad = _Ordered(vector_merge), _Ordered(vector_scores), _Ordered(vector_grad)

TL_TYPES = {
    "bf16": tl.bfloat16,
    "fp16": tl.float16,
    "fp32": tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


# operand type of the 0/1 sums of gates, by their precision
ONES_TYPES = {
    "raw": torch.bfloat16,
    "fp16": torch.float16,
    "tf32x3": torch.float32,
    "tf32": torch.float32,
    "ieee": torch.float32,
}
TORCH_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _one_matrices(dtype: torch.dtype, device: torch.device) -> Tensor:
    i = torch.arange(64, device=device)[:, None]
    t = torch.arange(64, device=device)[None, :]
    same = i // 32 == t // 32
    out = [(i >= t) & same, (i < t) & same, ~same]
    for half in (16, 8, 4, 2, 1):
        mid = i // (2 * half) * (2 * half) + half
        out.append(((i >= mid) & (t >= mid) & (t <= i)) | ((i < mid) & (t > i) & (t < mid)))
    return torch.stack(out).to(dtype)


_cached_ones = functools.lru_cache(maxsize=32)(_one_matrices)


def one_matrices(dtype: torch.dtype, device: torch.device) -> Tensor:
    """0/1 matrices `[8, 64, 64]` whose products with gates `[64 tokens, channels]` are sums over tokens.

    0: up to and with the token, 1: after it, both inside its block of 32; 2: all of the other block; 3..7: levels
    of the tree of the exact scores. Blocks of 32, 16, 8, 4 and 2 tokens are split in the middle: a token of the second
    half needs the decay from the middle up to itself, one of the first half the decay after itself up to the middle, so
    that factors never exceed 1, for any gate.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # Memory of a capture belongs to its graph.
        return _one_matrices(dtype, device)
    return _cached_ones(dtype, device)


def rows_of(x: Tensor, block: tuple[int, int], tma: bool) -> Any:
    """A tensor `[..., H, D]` as matrix of rows, by descriptor or as it is."""
    width = x.shape[-1] * x.shape[-2]
    return descriptor(x, x.numel() // width, width, *block) if tma else x


def matrix_of(x: Tensor, block: tuple[int, int], tma: bool) -> Any:
    """A buffer `[rows, width]` by descriptor or as it is."""
    return descriptor(x, x.shape[0], x.shape[1], *block) if tma else x


def aligned(*tensors: Tensor) -> bool:
    """Whether descriptors can address every head's tile: bases and heads on 16 bytes."""
    return all(x.data_ptr() % 16 == 0 and (x.shape[-1] * x.element_size()) % 16 == 0 and x.numel() > 0 for x in tensors)
