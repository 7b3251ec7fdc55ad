# SPDX-License-Identifier: MIT
# mypy: ignore-errors
"""The rotary kernel: a program turns all channel pairs of a block of heads of a few tokens. Everything in fp32."""

import triton
import triton.language as tl

from fla.ops._common.bisect import sequence_of


@triton.jit
def turn(
    x, y, cs, sn, token, live, seen, h0,
    SPAN: tl.constexpr, H: tl.constexpr, SX: tl.constexpr, HX: tl.constexpr, SY: tl.constexpr, HY: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, BR: tl.constexpr, BREST: tl.constexpr,
    INTERLEAVED: tl.constexpr, INPLACE: tl.constexpr,
):  # fmt: skip
    """Heads ``h0 ..`` of tokens ``token`` `[BT]`, of which ``live`` exist and ``seen`` have a position.

    ``SPAN`` heads are walked in all. ``SX``, ``HX``: distance of tokens and of heads.
    """
    h = h0 + tl.arange(0, BH)
    source = x + (token.to(tl.int64) * SX)[:, None, None] + (h * HX)[None, :, None]
    target = y + (token.to(tl.int64) * SY)[:, None, None] + (h * HY)[None, :, None]
    live = live[:, None, None]
    seen = seen[:, None, None]
    if SPAN != H:
        live = live & (h < H)[None, :, None]
        seen = seen & (h < H)[None, :, None]
    written = seen if INPLACE else live
    cs = cs[:, None, :]
    sn = sn[:, None, :]
    if INTERLEAVED:
        both = tl.arange(0, 2 * BR)[None, None, :]
        tile = tl.load(source + both, mask=seen & (both < 2 * R), other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(tile, (BT, BH, BR, 2)))
        tile = tl.reshape(tl.join(a * cs - b * sn, a * sn + b * cs), (BT, BH, 2 * BR))
        tl.store(target + both, tile.to(y.dtype.element_ty), mask=written & (both < 2 * R))
    else:
        half = tl.arange(0, BR)[None, None, :]
        a = tl.load(source + half, mask=seen & (half < R), other=0.0).to(tl.float32)
        b = tl.load(source + R + half, mask=seen & (half < R), other=0.0).to(tl.float32)
        tl.store(target + half, (a * cs - b * sn).to(y.dtype.element_ty), mask=written & (half < R))
        tl.store(target + R + half, (a * sn + b * cs).to(y.dtype.element_ty), mask=written & (half < R))
    if BREST > 0 and not INPLACE:
        rest = tl.arange(0, BREST)[None, None, :]
        mask = live & (rest < D - 2 * R)
        tl.store(target + 2 * R + rest, tl.load(source + 2 * R + rest, mask=mask, other=0.0), mask=mask)


@triton.jit
def table(p, at, known, c, R: tl.constexpr):
    return tl.load(p + at, mask=(c < R)[None, :], other=0.0).to(tl.float32) * known


@triton.jit(do_not_specialize=["offset", "tokens", "T", "TR", "N", "steps"])
def rotary_kernel(
    x, x2, cos, sin, cos2, sin2, offsets, cu, y, y2, offset, tokens, T, TR, N, steps,
    H: tl.constexpr, SX: tl.constexpr, HX: tl.constexpr, SY: tl.constexpr, HY: tl.constexpr, H2: tl.constexpr,
    SX2: tl.constexpr, HX2: tl.constexpr, SY2: tl.constexpr, HY2: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr, BR: tl.constexpr, BREST: tl.constexpr, INTERLEAVED: tl.constexpr,
    CONJUGATE: tl.constexpr, INPLACE: tl.constexpr,
):  # fmt: skip
    """``tokens`` counts those of all rows, ``T`` those of one. Tokens at negative positions become 0 (in place: stay),
    those without a row in the tables NaN. A second tensor ``x2`` of the same tokens may come along, with tables of its
    own or the same."""
    BLOCKS: tl.constexpr = (H + BH - 1) // BH
    BLOCKS2: tl.constexpr = (H2 + BH - 1) // BH
    ALL: tl.constexpr = BLOCKS if BLOCKS > BLOCKS2 else BLOCKS2
    SPAN: tl.constexpr = ALL * BH
    pid = tl.program_id(0)
    token = (pid // ALL) * BT + tl.arange(0, BT)
    h0 = (pid % ALL) * BH
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
    seen = live & (position >= 0)
    at = tl.where(seen & (position < TR), position, 0)[:, None] * R + c[None, :]
    known = tl.where(position < TR, 1.0, float("nan"))[:, None]
    cs = table(cos, at, known, c, R)
    sn = table(sin, at, known, c, R)
    turn(
        x, y, cs, -sn if CONJUGATE else sn, token, live, seen, h0, SPAN, H, SX, HX, SY, HY, D, R, BT, BH, BR, BREST,
        INTERLEAVED, INPLACE,
    )  # fmt: skip
    if x2 is not None:
        if cos2 is not None:
            cs = table(cos2, at, known, c, R)
            sn = table(sin2, at, known, c, R)
        turn(
            x2, y2, cs, -sn if CONJUGATE else sn, token, live, seen, h0, SPAN, H2, SX2, HX2, SY2, HY2, D, R, BT, BH, BR,
            BREST, INTERLEAVED, INPLACE,
        )  # fmt: skip
