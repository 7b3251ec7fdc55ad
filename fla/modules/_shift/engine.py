# SPDX-License-Identifier: MIT
"""Launch and autograd of the token shift."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fla.modules._shift.kernels import shift_kernel
from fla.ops._common.launch import Launcher, on_device
from fla.ops._common.policy import pow2
from fla.ops._common.single import once

_shift = Launcher(shift_kernel)


def shift(
    x: Tensor, edge: Tensor | None, cu: Tensor | None, back: bool, out: bool, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor | None]:
    """``(neighbour - x, rows at the far ends [N, D] or None)``; ``edge`` ``[N, D]`` is beyond the near ends."""
    B, T, D = x.shape
    N = B if cu is None else cu.numel() - 1
    x = x.contiguous()
    y = torch.empty_like(x)
    ends = None
    if out:
        shape, dtype = (N, D), out_dtype or x.dtype
        # An empty sequence writes nothing: what comes in goes out.
        if cu is None and T:
            ends = x.new_empty(shape, dtype=dtype)
        elif edge is None:
            ends = x.new_zeros(shape, dtype=dtype)
        else:
            ends = edge.reshape(shape).to(dtype, copy=True)
    if x.numel() == 0 or N == 0:
        return y, ends
    block = min(512, pow2(D, 1))
    height = 4096 // block if B * T * block >= 1 << 20 else 1024 // block
    edge = None if edge is None else edge.contiguous()
    _shift(
        -(-B * T // height) * -(-D // block),
        (x, edge, cu, y, ends, B * T, T, N, max(N - 1, 0).bit_length()),
        {"D": D, "BT": height, "BD": block, "BACK": back},
        {"num_warps": 4},
        (x, edge, cu, y, ends),
    )
    return y, ends


class Shift(torch.autograd.Function):
    """``(y, last tokens or None)``; keeps nothing of ``x``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cu: Tensor | None, cache: Tensor | None, output_cache: bool
    ) -> tuple[Tensor, Tensor | None]:
        ctx.cu = cu
        ctx.cache = None if cache is None else (cache.shape, cache.dtype)
        ctx.shape = x.shape, x.dtype, x.device
        ctx.set_materialize_grads(False)
        return shift(x, cache, cu, False, output_cache)

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor | None, dout: Tensor | None = None) -> tuple[Tensor | None, ...]:
        if dy is None and dout is None:
            return (None,) * 4
        shape, dtype, device = ctx.shape
        dy = torch.zeros(shape, dtype=dtype, device=device) if dy is None else dy
        has_cache = ctx.cache is not None
        with on_device(dy):
            dx, dcache = shift(dy, dout, ctx.cu, True, has_cache, ctx.cache[1] if has_cache else None)
        return dx, None, dcache.reshape(ctx.cache[0]) if dcache is not None else None, None


def token_shift(
    x: Tensor, cu_seqlens: Tensor | None = None, cache: Tensor | None = None, output_cache: bool = False,
    chunk_indices: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor | None]:  # fmt: skip
    """See the public function; arguments have been checked."""
    cu = None if cu_seqlens is None else cu_seqlens.to(x.device).contiguous()
    with on_device(x):
        y, out = Shift.apply(x, cu, cache, output_cache)
    return (y, out) if output_cache else y
