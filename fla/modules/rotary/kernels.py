# SPDX-License-Identifier: MIT
# mypy: ignore-errors
"""The rotary kernel: a program turns all channel pairs of a block of heads of a few tokens. Everything in fp32."""

import triton
import triton.language as tl

from fla.modules._kernels import sequence_of


@triton.jit(do_not_specialize=["offset", "tokens", "T", "TR", "N", "steps"])
def rotary_kernel(
    x, cos, sin, offsets, cu, y, offset, tokens, T, TR, N, steps,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, SX: tl.constexpr, HX: tl.constexpr, SY: tl.constexpr,
    HY: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, BR: tl.constexpr, BREST: tl.constexpr,
    INTERLEAVED: tl.constexpr, CONJUGATE: tl.constexpr, INPLACE: tl.constexpr,
):  # fmt: skip
    """``tokens`` counts those of all rows, ``T`` those of one. ``SX``, ``HX``: distance of tokens and of heads.

    Tokens at negative positions become 0 (in place: stay), those without a row in the tables NaN.
    """
    BLOCKS: tl.constexpr = (H + BH - 1) // BH
    pid = tl.program_id(0)
    token = (pid // BLOCKS) * BT + tl.arange(0, BT)
    h = (pid % BLOCKS) * BH + tl.arange(0, BH)
    c = tl.arange(0, BR)
    live = token < tokens
    if cu is not None:
        seq, start, _ = sequence_of(cu, token, T, N, steps)
        position = token - start
    else:
        seq = token // T
        position = token - seq * T
    if offsets is not None:
        position += tl.load(offsets + seq, mask=live & (seq < N), other=0).to(tl.int32)
    else:
        position += offset
    at = tl.where(live & (position >= 0) & (position < TR), position, 0)[:, None] * R + c[None, :]
    cs = tl.load(cos + at, mask=(c < R)[None, :], other=0.0).to(tl.float32)
    sn = tl.load(sin + at, mask=(c < R)[None, :], other=0.0).to(tl.float32)
    if CONJUGATE:
        sn = -sn
    known = tl.where(position < TR, 1.0, float("nan"))[:, None]
    cs = (cs * known)[:, None, :]
    sn = (sn * known)[:, None, :]
    heads = (h < H)[None, :, None]
    turned = (live & (position >= 0))[:, None, None]
    live = live[:, None, None]
    if BH * BLOCKS != H:
        turned = turned & heads
        live = live & heads
    written = turned if INPLACE else live
    source = x + (token.to(tl.int64) * SX)[:, None, None] + (h * HX)[None, :, None]
    target = y + (token.to(tl.int64) * SY)[:, None, None] + (h * HY)[None, :, None]
    if INTERLEAVED:
        both = tl.arange(0, 2 * BR)[None, None, :]
        tile = tl.load(source + both, mask=turned & (both < 2 * R), other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(tile, (BT, BH, BR, 2)))
        tile = tl.reshape(tl.join(a * cs - b * sn, a * sn + b * cs), (BT, BH, 2 * BR))
        tl.store(target + both, tile.to(y.dtype.element_ty), mask=written & (both < 2 * R))
    else:
        half = c[None, None, :]
        mask = turned & (half < R)
        a = tl.load(source + half, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(source + R + half, mask=mask, other=0.0).to(tl.float32)
        mask = written & (half < R)
        tl.store(target + half, (a * cs - b * sn).to(y.dtype.element_ty), mask=mask)
        tl.store(target + R + half, (a * sn + b * cs).to(y.dtype.element_ty), mask=mask)
    if BREST > 0 and not INPLACE:
        rest = tl.arange(0, BREST)[None, None, :]
        mask = live & (rest < D - 2 * R)
        tl.store(target + 2 * R + rest, tl.load(source + 2 * R + rest, mask=mask, other=0.0), mask=mask)
