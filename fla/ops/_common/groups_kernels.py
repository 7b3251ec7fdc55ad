# SPDX-License-Identifier: MIT
# mypy: ignore-errors
# ruff: noqa: RUF005  (kernels have no starred tuples)
"""What kernels in Gluon share that have a warp that copies and groups of four warps that compute, for Hopper.

Tiles go round a ring of places in shared memory. One barrier of a place says that it is full, another that it is free.
"""

from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fla.ops._common.gluon_language import gl


@gluon.jit
def places(v0, K: gl.constexpr, V: gl.constexpr, VFIRST: gl.constexpr, layout: gl.constexpr):
    """Offsets of 64 rows of the transposed state in one caller's state, `[K, V]` or `[V, K]`."""
    rv = v0 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    rk = gl.arange(0, K, layout=gl.SliceLayout(0, layout))
    if VFIRST:
        return rv[:, None] * K + rk[None, :]
    else:
        return rv[:, None] + rk[None, :] * V


@gluon.jit
def ring(N: gl.constexpr, NC: gl.constexpr):
    """Barriers of N places: that a place is full, and after all of these, that ``NC`` groups are done with it."""
    bars = gl.allocate_shared_memory(gl.int64, [2 * N, 1], mbarrier.MBarrierLayout())
    for j in gl.static_range(N):
        mbarrier.init(bars.index(j), count=1)
        mbarrier.init(bars.index(N + j), count=NC)
    return bars


@gluon.jit
def onward(at, phase, N: gl.constexpr):
    """The next of N places, and the phase of its barriers."""
    at += 1
    if at == N:
        at = 0
        phase ^= 1
    return at, phase


@gluon.jit
def sequence_of(cu, offsets, i, T, NT, VARLEN: gl.constexpr):
    """`sequence_at` for Gluon."""
    if VARLEN:
        bos = gl.minimum(gl.maximum(gl.load(cu + i).to(gl.int32), 0), T)
        eos = gl.minimum(gl.maximum(gl.load(cu + i + 1).to(gl.int32), 0), T)
        first = gl.load(offsets + i)
        length = gl.maximum(eos - bos, 0)
    else:
        bos = i * T
        length = T
        first = i * NT
    return bos, length, first


@gluon.jit
def block_of(cu, offsets, T, NT, H, V: gl.constexpr, COLS: gl.constexpr, VARLEN: gl.constexpr):
    """What a program does, of all blocks of ``COLS`` columns of V, heads and sequences: first column, head, sequence,
    and the sequence's first row, length and first tile."""
    pid = gl.program_id(0)
    NV: gl.constexpr = V // COLS
    v0 = (pid % NV) * COLS
    h = (pid // NV) % H
    i = pid // (NV * H)
    bos, length, first = sequence_of(cu, offsets, i, T, NT, VARLEN)
    return v0, h, i, bos, length, first


@gluon.jit
def clear_rows(tile, left, COLS: gl.constexpr):
    """Zeros in the rows of ``tile`` [64, COLS] from ``left`` on. All groups may do so to one tile."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLS, COLS // 8], [4, 1], [1, 0])
    for j in gl.static_range(4):
        part = tile.slice(16 * j, 16, dim=0)
        r = 16 * j + gl.arange(0, 16, layout=gl.SliceLayout(1, layout))
        x = part.load(layout)
        part.store(gl.where((r < left)[:, None], x, gl.zeros_like(x)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def store_left(x, p, row, left, h, HV, v0, V: gl.constexpr):
    """``x`` [64, 64] to columns ``v0 ..`` of a head of a `[rows, HV, V]` tensor: rows before ``left``."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    base = p + (row.to(gl.int64) * HV + h) * V + v0
    mask = (r < left)[:, None] & (c >= 0)[None, :]
    gl.store(base + (r[:, None] * (HV * V) + c[None, :]), x.load(layout), mask=mask)


@gluon.jit
def _block_places(
    v0, k0, K: gl.constexpr, V: gl.constexpr, B: gl.constexpr, VFIRST: gl.constexpr, layout: gl.constexpr
):
    """`places` of B channels from ``k0`` on."""
    rv = v0 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    rk = k0 + gl.arange(0, B, layout=gl.SliceLayout(0, layout))
    if VFIRST:
        return rv[:, None] * K + rk[None, :]
    else:
        return rv[:, None] + rk[None, :] * V


@gluon.jit
def blocks_in(
    p, given, v0, K: gl.constexpr, V: gl.constexpr, B: gl.constexpr, VFIRST: gl.constexpr, layout: gl.constexpr
):
    """64 rows of the transposed state in one caller's state at ``p`` in blocks of B channels; zeros if none is
    given."""
    S = ()
    for j in gl.static_range(K // B):
        X = gl.zeros([64, B], gl.float32, layout=layout)
        if given != 0:
            X = gl.load(p + _block_places(v0, j * B, K, V, B, VFIRST, layout)).to(gl.float32)
        S = S + (X,)
    return S


@gluon.jit
def blocks_out(S, p, v0, K: gl.constexpr, V: gl.constexpr, B: gl.constexpr, VFIRST: gl.constexpr, layout: gl.constexpr):
    """Write what `blocks_in` reads."""
    for j in gl.static_range(K // B):
        gl.store(p + _block_places(v0, j * B, K, V, B, VFIRST, layout), S[j])


@gluon.jit
def scaled(S, factor, P: gl.constexpr):
    """P blocks times a number."""
    X = ()
    for j in gl.static_range(P):
        X = X + (S[j] * factor,)
    return X


@gluon.jit
def together(S, P: gl.constexpr):
    """The sum of P blocks."""
    X = S[0]
    for j in gl.static_range(1, P):
        X = X + S[j]
    return X


@gluon.jit
def updated(w, tiles, at, S, P: gl.constexpr):
    """``S`` plus the products of ``w`` and the P tiles of place ``at``, on their way."""
    X = ()
    for j in gl.static_range(P):
        X = X + (warpgroup_mma(w, tiles.index(P * at + j), S[j], is_async=True),)
    return X


@gluon.jit
def waited(S, P: gl.constexpr):
    """``S`` when all products are there."""
    X = ()
    for j in gl.static_range(P):
        X = X + (warpgroup_mma_wait(0, deps=[S[j]]),)
    return X


@gluon.jit
def bring(d, row, h, bar, tiles, at, K: gl.constexpr, B: gl.constexpr):
    """Have rows of a head with K channels copied to place ``at``, in blocks of B channels."""
    for j in gl.static_range(K // B):
        tma.async_copy_global_to_shared(d, [row, h * K + j * B], bar, tiles.index(at * (K // B) + j))


@gluon.jit
def send(x, tile, d, row, col):
    """``x`` through ``tile``, which earlier copies have left, to a matrix."""
    tile.store(x)
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(d, [row, col], tile)


@gluon.jit
def send_rows(x, tile, p, d, row, left, h, HV, v0, V: gl.constexpr, C: gl.constexpr, TAIL: gl.constexpr):
    """The transposed ``x`` to columns ``v0 ..`` of a head of a `[rows, HV, V]` tensor: rows before ``left``."""
    tile.permute((1, 0)).store(x)
    if TAIL:
        if left < C:
            store_left(tile, p, row, left, h, HV, v0, V)
        else:
            fence_async_shared()
            gl.thread_barrier()
            tma.async_copy_shared_to_global(d, [row, h * V + v0], tile)
    else:
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(d, [row, h * V + v0], tile)
