# SPDX-License-Identifier: MIT
"""The Triton path of the rotary embedding: launch, autograd."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fla.modules._written import written
from fla.modules.rotary.kernels import rotary_kernel
from fla.ops._common.launch import Fixed, Launcher, on_device
from fla.ops._common.policy import pow2
from fla.ops._common.single import applied, once, savable

# Channel pairs of a tile, and warps: 16 pairs a thread, in vectors of 16 bytes.
PAIRS = 2048
WARPS = 4

_rotate = Launcher(rotary_kernel)


@functools.lru_cache(maxsize=512)
def _launch(
    heads: tuple[int, int, int, int, int], heads2: tuple[int, int, int, int, int], D: int, R: int, few: bool,
    interleaved: bool, conjugate: bool, inplace: bool,
) -> tuple[Fixed, int, int]:  # fmt: skip
    """The launch, tokens of a tile, and head blocks. ``heads``: number, then distances of tokens and of heads in the
    input and in the output."""
    most = max(heads[0], heads2[0])
    BR = pow2(R, 1)
    # Few tokens: one head block after another costs less than idle multiprocessors.
    pairs = PAIRS // 8 if few else PAIRS
    BH = min(pow2(most, 1), max(1, pairs // BR))
    BT = max(1, pairs // (BR * BH))
    rest = D - 2 * R
    meta = {
        **dict(zip(("H", "SX", "HX", "SY", "HY"), heads, strict=True)),
        **dict(zip(("H2", "SX2", "HX2", "SY2", "HY2"), heads2, strict=True)),
        "D": D, "R": R, "BT": BT, "BH": BH, "BR": BR, "BREST": pow2(rest, 1) if rest else 0,
        "INTERLEAVED": interleaved, "CONJUGATE": conjugate, "INPLACE": inplace,
    }  # fmt: skip
    warps = max(1, min(WARPS, BT * BH * BR // 512))
    return _rotate.fix(meta, {"num_warps": warps}), BT, -(-most // BH)


def _readable(x: Tensor) -> Tensor:
    """``x`` with tokens of all rows one distance apart and the channels of a head next to each other."""
    if x.stride(-1) == 1 and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)):
        return x
    return x.contiguous()


def _heads(x: Tensor, y: Tensor) -> tuple[int, int, int, int, int]:
    _, sx, hx, _ = x.stride()
    _, sy, hy, _ = y.stride()
    return x.shape[2], sx, hx, sy, hy


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, offsets: int | Tensor, cu_seqlens: Tensor | None, interleaved: bool,
    inplace: bool, conjugate: bool, x2: Tensor | None = None, cos2: Tensor | None = None, sin2: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The rotation of ``x`` ``[B, T, H, D]``, into a new contiguous tensor or in place.

    ``x2`` ``[B, T, H2, D]`` is rotated in the same launch, never in place, by ``cos2`` and ``sin2`` or, without them,
    by the same tables.
    """
    B, T, _, D = x.shape
    R = cos.shape[-1]
    source = _readable(x)
    y = source if inplace else torch.empty_like(x, memory_format=torch.contiguous_format)
    y2 = None
    if x2 is not None:
        x2 = _readable(x2)
        y2 = torch.empty_like(x2, memory_format=torch.contiguous_format)
    if x.numel() == 0 or R == 0:
        if not inplace:
            y.copy_(x)
        if y2 is not None and x2 is not None:
            y2.copy_(x2)
        return x if inplace else y, y2
    tokens = B * T
    N, cu, tensor, offset = B, None, None, offsets
    if cu_seqlens is not None:
        N = cu_seqlens.numel() - 1
        cu = cu_seqlens.to(x.device).contiguous()
    if isinstance(offsets, Tensor):
        tensor, offset = offsets.to(x.device).contiguous(), 0
    launch, block, blocks = _launch(
        _heads(source, y), (0, 0, 0, 0, 0) if x2 is None or y2 is None else _heads(x2, y2), D, R,
        y.numel() < 1 << 21, interleaved, conjugate, inplace,
    )  # fmt: skip
    launch(
        -(-tokens // block) * blocks,
        (
            source, x2, cos, sin, cos2, sin2, tensor, cu, y, y2, offset, tokens, T, len(cos), N,
            max(N - 1, 0).bit_length(),
        ),
        (source, x2, cos, sin, cos2, tensor, cu, y),
    )  # fmt: skip
    if inplace and y is not x:
        x.copy_(y)
        return x, None
    return y, y2


def _body(
    x: Tensor, x2: Tensor | None, cos: Tensor, sin: Tensor, cos2: Tensor | None, sin2: Tensor | None,
    offsets: Tensor | None, cu_seqlens: Tensor | None, interleaved: bool, conjugate: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    where = 0 if offsets is None else offsets
    return rotate(x, cos, sin, where, cu_seqlens, interleaved, False, conjugate, x2, cos2, sin2)


def _turned(
    x: Tensor, cos: Tensor, sin: Tensor, offsets: int | Tensor, cu_seqlens: Tensor | None, interleaved: bool,
    conjugate: bool, x2: Tensor | None = None, cos2: Tensor | None = None, sin2: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`rotate` into new tensors, written out unless an offset on the host makes every call another one."""
    # Offsets and boundaries may be on the host.
    tensor = offsets.to(x.device) if isinstance(offsets, Tensor) else None
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(x.device)
    if tensor is None and offsets:
        return rotate(x, cos, sin, offsets, cu_seqlens, interleaved, False, conjugate, x2, cos2, sin2)
    key = (
        "rotary", x.shape, x.stride(), cos.shape, interleaved, conjugate,
        *(() if x2 is None else (x2.shape, x2.stride())), None if cu_seqlens is None else cu_seqlens.shape,
    )  # fmt: skip
    inputs = (x, x2, cos, sin, cos2, sin2, tensor, cu_seqlens)
    found: tuple[Tensor, Tensor | None] = written(key, _body, inputs, interleaved, conjugate)
    return found


class Rotary(torch.autograd.Function):
    """The rotation of ``x``, and of ``x2`` if given; its gradient is the rotation back. Keeps the tables only."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, x2: Tensor | None, tables: tuple[Tensor | None, ...], offsets: int | Tensor,
        cu_seqlens: Tensor | None, interleaved: bool, inplace: bool, conjugate: bool,
    ) -> Any:  # fmt: skip
        # Tables have no gradient and are replaced, never written to: no need to save them as graph tensors.
        tensor = offsets if isinstance(offsets, Tensor) else None
        if tensor is not None or cu_seqlens is not None:
            ctx.save_for_backward(savable(tensor), savable(cu_seqlens))
        ctx.kept = tables, None if tensor is not None else offsets, interleaved, inplace, conjugate
        cos, sin, cos2, sin2 = tables
        assert cos is not None
        assert sin is not None
        if inplace:
            y, y2 = rotate(x, cos, sin, offsets, cu_seqlens, interleaved, True, conjugate)
            ctx.mark_dirty(x)
        else:
            y, y2 = _turned(x, cos, sin, offsets, cu_seqlens, interleaved, conjugate, x2, cos2, sin2)
        if x2 is None:
            return y
        ctx.set_materialize_grads(False)
        return y, y2

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor | None, dy2: Tensor | None = None) -> tuple[Tensor | None, ...]:
        (cos, sin, cos2, sin2), offsets, interleaved, inplace, conjugate = ctx.kept
        tensor, cu_seqlens = ctx.saved_tensors or (None, None)
        offsets = offsets if tensor is None else tensor
        if dy is None:
            if dy2 is None:
                return (None,) * 8
            if cos2 is not None:
                cos, sin = cos2, sin2
            with on_device(dy2):
                alone, _ = _turned(dy2, cos, sin, offsets, cu_seqlens, interleaved, not conjugate)
            return None, alone, None, None, None, None, None, None
        # In place, rows at negative positions have passed through, and so has their gradient: a copy in place too.
        with on_device(dy):
            if inplace:
                dx, dx2 = rotate(dy.clone(), cos, sin, offsets, cu_seqlens, interleaved, True, not conjugate)
            else:
                both = (None, None) if dy2 is None else (cos2, sin2)
                dx, dx2 = _turned(dy, cos, sin, offsets, cu_seqlens, interleaved, not conjugate, dy2, *both)
        return dx, dx2, None, None, None, None, None, None


_rotary = applied(Rotary)


def rotary_embedding_fwdbwd(
    x: Tensor, cos: Tensor, sin: Tensor, seqlen_offsets: int | Tensor = 0, cu_seqlens: Tensor | None = None,
    interleaved: bool = False, inplace: bool = False, conjugate: bool = False, chunk_indices: Tensor | None = None,
) -> Tensor:  # fmt: skip
    cos, sin = cos.detach().contiguous(), sin.detach().contiguous()
    with on_device(x):
        if torch.is_grad_enabled() and x.requires_grad:
            tables = cos, sin, None, None
            return _rotary(x, None, tables, seqlen_offsets, cu_seqlens, interleaved, inplace, conjugate)
        if inplace:
            return rotate(x, cos, sin, seqlen_offsets, cu_seqlens, interleaved, True, conjugate)[0]
        return _turned(x, cos, sin, seqlen_offsets, cu_seqlens, interleaved, conjugate)[0]


def rotary_embedding(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inplace: bool = False,
    seqlen_offsets: int | Tensor = 0, cu_seqlens: Tensor | None = None, chunk_indices: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return rotary_embedding_fwdbwd(x, cos, sin, seqlen_offsets, cu_seqlens, interleaved, inplace)


def rotary_pair(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, cos_k: Tensor, sin_k: Tensor, interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tables: tuple[Tensor | None, ...] = (cos, sin, None, None) if cos_k is cos else (cos, sin, cos_k, sin_k)
    with on_device(q):
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
            return _rotary(q, k, tables, seqlen_offsets, cu_seqlens, interleaved, False, False)
        y, y2 = _turned(q, cos, sin, seqlen_offsets, cu_seqlens, interleaved, False, k, tables[2], tables[3])
    assert y2 is not None
    return y, y2
