# SPDX-License-Identifier: MIT
# mypy: ignore-errors
"""Tile access shared by the kernels of the engines.

Every tile has two ways in: a descriptor, copied by the chip's own engine, for full tiles of power-of-two width (DESC 1,
or DESC 2 for the same tiles through plain pointers); and masked pointers for the rest (ragged tails, odd widths, other
chips; DESC 0). A descriptor tile that crosses the end of a
sequence holds rows of the next one, so descriptor tiles are only loaded where all rows belong to the sequence, or where
every use is row-local and selected afterwards.
"""

import triton
import triton.language as tl


@triton.jit
def load_rows(p, d, row, n, head, H, d0, D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, DESC: tl.constexpr):
    """Tile [C, BD] of a `[rows, H, D]` tensor: rows ``row ..``, columns ``d0 ..`` of one head; rows from ``n`` on
    are 0."""
    if DESC == 1:
        return d.load([row, head * D + d0])
    elif DESC == 2:
        base = p + (row.to(tl.int64) * H + head) * D + d0
        return tl.load(base + tl.arange(0, C)[:, None] * (H * D) + tl.arange(0, BD)[None, :])
    else:
        rr = tl.arange(0, C)
        cd = d0 + tl.arange(0, BD)
        base = p + (row.to(tl.int64) * H + head) * D
        mask = (rr < n)[:, None] & (cd < D)[None, :]
        return tl.load(base + rr[:, None] * (H * D) + cd[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(p, d, x, row, n, head, H, d0, D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, DESC: tl.constexpr):
    """The counterpart of `load_rows`; rows from ``n`` on are not written."""
    if DESC:
        d.store([row, head * D + d0], x)
    else:
        rr = tl.arange(0, C)
        cd = d0 + tl.arange(0, BD)
        base = p + (row.to(tl.int64) * H + head) * D
        mask = (rr < n)[:, None] & (cd < D)[None, :]
        tl.store(base + rr[:, None] * (H * D) + cd[None, :], x, mask=mask)


@triton.jit
def load_tile(
    p, d, tile, r0, c0, R: tl.constexpr, CC: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, DESC: tl.constexpr,
):  # fmt: skip
    """Block [BR, BC] at (r0, c0) of matrix number ``tile`` in a buffer of `[R, CC]` matrices."""
    if DESC == 1:
        return d.load([tile * R + r0, c0])
    elif DESC == 2:
        base = p + tile.to(tl.int64) * (R * CC) + r0 * CC + c0
        return tl.load(base + tl.arange(0, BR)[:, None] * CC + tl.arange(0, BC)[None, :])
    else:
        r = r0 + tl.arange(0, BR)
        c = c0 + tl.arange(0, BC)
        mask = (r < R)[:, None] & (c < CC)[None, :]
        return tl.load(p + tile.to(tl.int64) * (R * CC) + r[:, None] * CC + c[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(
    p, d, x, tile, r0, c0, R: tl.constexpr, CC: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, DESC: tl.constexpr,
):  # fmt: skip
    """The counterpart of `load_tile`."""
    if DESC:
        d.store([tile * R + r0, c0], x)
    else:
        r = r0 + tl.arange(0, BR)
        c = c0 + tl.arange(0, BC)
        mask = (r < R)[:, None] & (c < CC)[None, :]
        tl.store(p + tile.to(tl.int64) * (R * CC) + r[:, None] * CC + c[None, :], x, mask=mask)


@triton.jit
def state_offsets(
    v0, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, VFIRST: tl.constexpr, k0=0
):  # fmt: skip
    """Offsets and mask of the transposed tile [BV, BK] at (v0, k0) in one caller's state, `[K, V]` or `[V, K]`."""
    v = v0 + tl.arange(0, BV)
    c = k0 + tl.arange(0, BK)
    mask = (v < V)[:, None] & (c < K)[None, :]
    if VFIRST:
        return v[:, None] * K + c[None, :], mask
    else:
        return v[:, None] + c[None, :] * V, mask
