# SPDX-License-Identifier: MIT
"""The Triton path of the rotary embedding: launch, autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fla.backends import needs_backward
from fla.modules.rotary.kernels import rotary_kernel
from fla.ops._common.launch import Launcher, on_device
from fla.ops._common.policy import pow2

# Channel pairs of a program, and what a thread does with them: 16 pairs, in two or four vectors of 16 bytes.
PAIRS = 2048
WARPS = 4

_rotate = Launcher(rotary_kernel)


def _uniform(x: Tensor) -> bool:
    """Whether tokens of all rows are one distance apart and the channels of a head follow each other."""
    B, T = x.shape[:2]
    return x.stride(-1) == 1 and (B == 1 or x.stride(0) == T * x.stride(1))


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, offsets: int | Tensor, cu_seqlens: Tensor | None, interleaved: bool,
    inplace: bool, conjugate: bool,
) -> Tensor:  # fmt: skip
    """The rotation of ``x`` ``[B, T, H, D]``, into a new contiguous tensor or in place."""
    B, T, H, D = x.shape
    R = cos.shape[-1]
    source = x if _uniform(x) else x.contiguous()
    y = source if inplace else torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0 or R == 0:
        return x if inplace else y.copy_(x)
    tokens = B * T
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    tensor = offsets.to(x.device).contiguous() if isinstance(offsets, Tensor) else None
    cu = None if cu_seqlens is None else cu_seqlens.to(x.device).contiguous()
    BR = pow2(R, 1)
    # Few programs: one head block after another costs less than idle multiprocessors.
    pairs = PAIRS if tokens * H * BR >= 512 * PAIRS else PAIRS // 8
    BH = min(pow2(H, 1), max(1, pairs // BR))
    BT = max(1, pairs // (BR * BH))
    rest = D - 2 * R
    _rotate(
        -(-tokens // BT) * -(-H // BH),
        (
            source, cos.contiguous(), sin.contiguous(), tensor, cu, y, 0 if tensor is not None else offsets, tokens,
            T, len(cos), N, max(N - 1, 0).bit_length(),
        ),
        {
            "H": H, "D": D, "R": R, "SX": source.stride(1), "HX": source.stride(2), "SY": y.stride(1),
            "HY": y.stride(2), "BT": BT, "BH": BH, "BR": BR, "BREST": pow2(rest, 1) if rest else 0,
            "INTERLEAVED": interleaved, "CONJUGATE": conjugate, "INPLACE": inplace,
        },
        {"num_warps": max(1, min(WARPS, BT * BH * BR // 512))},
        (source, cos, sin, tensor, cu, y),
    )  # fmt: skip
    if inplace and y is not x:
        x.copy_(y)
        return x
    return y


class Rotary(torch.autograd.Function):
    """The rotation; its gradient is the rotation back. Keeps the tables only."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, offsets: int | Tensor, cu_seqlens: Tensor | None,
        interleaved: bool, inplace: bool, conjugate: bool,
    ) -> Tensor:  # fmt: skip
        tensor = offsets if isinstance(offsets, Tensor) else None
        ctx.save_for_backward(cos, sin, cu_seqlens, tensor)
        ctx.offset, ctx.interleaved, ctx.conjugate = None if tensor is not None else offsets, interleaved, conjugate
        ctx.inplace = inplace
        if inplace:
            ctx.mark_dirty(x)
        return rotate(x, cos, sin, offsets, cu_seqlens, interleaved, inplace, conjugate)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, cu_seqlens, tensor = ctx.saved_tensors
        offsets = ctx.offset if tensor is None else tensor
        # In place, rows at negative positions have passed through, and so has their gradient: a copy in place too.
        dy = dy.clone() if ctx.inplace else dy
        with on_device(dy):
            dx = rotate(dy, cos, sin, offsets, cu_seqlens, ctx.interleaved, ctx.inplace, not ctx.conjugate)
        return dx, None, None, None, None, None, None, None


def rotary_embedding_fwdbwd(
    x: Tensor, cos: Tensor, sin: Tensor, seqlen_offsets: int | Tensor = 0, cu_seqlens: Tensor | None = None,
    interleaved: bool = False, inplace: bool = False, conjugate: bool = False, chunk_indices: Tensor | None = None,
) -> Tensor:  # fmt: skip
    cos, sin = cos.detach(), sin.detach()
    with on_device(x):
        if needs_backward((x,)):
            return Rotary.apply(x, cos, sin, seqlen_offsets, cu_seqlens, interleaved, inplace, conjugate)
        return rotate(x, cos, sin, seqlen_offsets, cu_seqlens, interleaved, inplace, conjugate)


def rotary_embedding(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inplace: bool = False,
    seqlen_offsets: int | Tensor = 0, cu_seqlens: Tensor | None = None, chunk_indices: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return rotary_embedding_fwdbwd(x, cos, sin, seqlen_offsets, cu_seqlens, interleaved, inplace)
