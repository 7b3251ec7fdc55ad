# SPDX-License-Identifier: MIT
# mypy: ignore-errors
"""State passes of the vector-decay chunk form with a warp that copies and groups of warps that compute, for Hopper.

What `vector_scan` and `vector_scan_bwd` do, in Gluon, over chunks of 32 tokens: each group of four warps holds 64
columns of V and goes its own pace, and a warp of its own keeps the tiles of the next chunks on their way in one ring;
see `scalar_groups`. What `vector_prep` writes is 0 past the end of a sequence; values and gradients of the output,
which may hold anything there, are cleared before they are used.
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
from fla.ops._common.groups_kernels import block_of, onward, places, ring
from fla.ops._delta.kernels.groups_watch import judge, saturate, watch


@gluon.jit
def clear_chunk(tile, left):
    """Zeros in the rows of a group's ``tile`` [32, 64] from ``left`` on."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    r = gl.arange(0, 32, layout=gl.SliceLayout(1, layout))
    x = tile.load(layout)
    tile.store(gl.where((r < left)[:, None], x, gl.zeros_like(x)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def store_chunk(tile, p, desc, row, left, h, H, v0, V: gl.constexpr, TAIL: gl.constexpr):
    """``tile`` [32, 64] to columns ``v0 ..`` of a head of a `[rows, H, V]` tensor: rows before ``left``."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    if TAIL:
        if left < 32:
            r = gl.arange(0, 32, layout=gl.SliceLayout(1, layout))
            c = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
            base = p + (row.to(gl.int64) * H + h) * V + v0
            mask = (r < left)[:, None] & (c >= 0)[None, :]
            gl.store(base + (r[:, None] * (H * V) + c[None, :]), tile.load(layout), mask=mask)
        else:
            tma.async_copy_shared_to_global(desc, [row, h * V + v0], tile)
    else:
        tma.async_copy_shared_to_global(desc, [row, h * V + v0], tile)


@gluon.jit
def _copy(
    bars, kds, kus, qds, tbs, as_, vs, es, td, md, vd, ed, bos, first, h, H, v0, n,
    K: gl.constexpr, V: gl.constexpr, NM: gl.constexpr, OUT: gl.constexpr, N: gl.constexpr, NC: gl.constexpr,
):  # fmt: skip
    at = 0
    phase = 1
    size: gl.constexpr = 64 * (2 * K + 32 + 64 * NC + (K + 32 if OUT else 0)) + 4 * K
    for t in range(n):
        w = (first + t // 2) * H + h
        sub = t % 2
        full = bars.index(at)
        mbarrier.wait(bars.index(N + at), phase)
        mbarrier.expect(full, size)
        tma.async_copy_global_to_shared(td, [w * 192 + sub * 32, 0], full, kds.index(at))
        tma.async_copy_global_to_shared(vd, [bos + t * 32, h * V + v0], full, vs.index(NC * at))
        if NC == 2:
            tma.async_copy_global_to_shared(vd, [bos + t * 32, h * V + v0 + 64], full, vs.index(2 * at + 1))
        tma.async_copy_global_to_shared(md, [w * (64 * NM) + sub * 32, 0], full, tbs.index(at))
        tma.async_copy_global_to_shared(td, [w * 192 + 64 + sub * 32, 0], full, kus.index(at))
        tma.async_copy_global_to_shared(ed, [w * 2 + sub, 0], full, es.index(at))
        if OUT:
            tma.async_copy_global_to_shared(td, [w * 192 + 128 + sub * 32, 0], full, qds.index(at))
            tma.async_copy_global_to_shared(md, [w * (64 * NM) + 64 + sub * 32, 0], full, as_.index(at))
        at, phase = onward(at, phase, N)


@gluon.jit
def _compute(
    bars, kds, kus, qds, tbs, as_, vs, es, os, Ss, Us, o, od, Sd, Ud, h0, ht, bos, first, length, h, H, v0, n, state,
    has_h0, has_ht, long,
    K: gl.constexpr, V: gl.constexpr, OUT: gl.constexpr, SAVE: gl.constexpr, VFIRST: gl.constexpr, TAIL: gl.constexpr,
    WATCH: gl.constexpr, N: gl.constexpr, NC: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    dt: gl.constexpr = kds.dtype
    big: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, K, 16])
    small: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16])
    left_s: gl.constexpr = gl.DotOperandLayout(0, small, 2)
    left_b: gl.constexpr = gl.DotOperandLayout(0, big, 2)
    v0 += 64 * W
    S = gl.zeros([64, K], gl.float32, layout=big)
    if has_h0 != 0:
        S = gl.load(h0 + state + places(v0, K, V, VFIRST, big)).to(gl.float32)
    zero = gl.zeros([64, 32], gl.float32, layout=small)
    token = gl.arange(0, 32, layout=gl.SliceLayout(0, small))
    if WATCH:
        top = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, small))
    at = 0
    phase = 0
    for t in range(n):
        w = (first + t // 2) * H + h
        sub = t % 2
        left = length - t * 32
        Sb = S.to(dt)
        mbarrier.wait(bars.index(at), phase)
        Sa = gl.convert_layout(Sb, left_s)
        x = warpgroup_mma(Sa, kds.index(at).permute((1, 0)), zero, use_acc=False, is_async=True)
        if OUT:
            y = warpgroup_mma(Sa, qds.index(at).permute((1, 0)), zero, use_acc=False, is_async=True)
        if SAVE:
            # The last step's copy out of this buffer has been read; those begun after it may be on their way.
            tma.store_wait(2 if OUT and not TAIL else 1)
            gl.thread_barrier()
            Ss.store(Sb)
            fence_async_shared()
            gl.thread_barrier()
            tma.async_copy_shared_to_global(Sd, [(w * 2 + sub) * V + v0, 0], Ss)
        vt = vs.index(NC * at + W).permute((1, 0)).load(small).to(gl.float32)
        if OUT:
            x = warpgroup_mma_wait(1, deps=[x])
        else:
            x = warpgroup_mma_wait(0, deps=[x])
        r = vt - x
        if TAIL:
            r = gl.where((token < left)[None, :], r, zero)
        u = warpgroup_mma(
            gl.convert_layout(r.to(dt), left_s), tbs.index(at).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        S = S * es.index(at).load(big)
        if OUT:
            y, u = warpgroup_mma_wait(0, deps=[y, u])
        else:
            u = warpgroup_mma_wait(0, deps=[u])
        ub = u.to(dt)
        S = warpgroup_mma(gl.convert_layout(ub, left_b), kus.index(at), S, is_async=True)
        if OUT:
            y = warpgroup_mma(gl.convert_layout(ub, left_s), as_.index(at).permute((1, 0)), y, is_async=True)
        if SAVE:
            tma.store_wait(1)
            gl.thread_barrier()
            Us.store(ub)
            fence_async_shared()
            gl.thread_barrier()
            tma.async_copy_shared_to_global(Ud, [w * V + v0, sub * 32], Us)
        if OUT:
            S, y = warpgroup_mma_wait(0, deps=[S, y])
        else:
            S = warpgroup_mma_wait(0, deps=[S])
        mbarrier.arrive(bars.index(N + at), count=1)
        if OUT:
            if WATCH:
                top = watch(top, y)
                y = saturate(y)
            tma.store_wait(2 if SAVE else 0)
            gl.thread_barrier()
            os.index(W).permute((1, 0)).store(y.to(dt))
            fence_async_shared()
            gl.thread_barrier()
            store_chunk(os.index(W), o, od, bos + t * 32, left, h, H, v0, V, TAIL)
        at, phase = onward(at, phase, N)
    tma.store_wait(0)
    if has_ht != 0:
        gl.store(ht + state + places(v0, K, V, VFIRST, big), S)
    if WATCH and OUT:
        judge(long, top, S, 1, big)


@gluon.jit(do_not_specialize=["T", "NT", "H", "has_h0", "has_ht"])
def vector_groups(
    o, td, md, vd, ed, od, Sd, Ud, h0, ht, cu, offsets, T, NT, H, has_h0, has_ht, long,
    K: gl.constexpr, V: gl.constexpr, NM: gl.constexpr, OUT: gl.constexpr, SAVE: gl.constexpr, NC: gl.constexpr,
    VFIRST: gl.constexpr, VARLEN: gl.constexpr, TAIL: gl.constexpr, WATCH: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """One program a block of ``64 NC`` columns of V, head and sequence. OUT: write o. SAVE, with one group only: write
    the state before each 32 tokens and the new values, transposed, as `vector_scan` with 2 and NEWS does. N: places of
    the ring. WATCH: float16, whose range is watched; see `common`."""
    v0, h, i, bos, length, first = block_of(cu, offsets, T, NT, H, V, 64 * NC, VARLEN)
    n = (length + 63) // 64 * 2
    if WATCH:
        # Where the form in float32 does the work nothing is read or written.
        mine = gl.load(long) == 0
        n = gl.where(mine, n, 0)
        has_h0 = gl.where(mine, has_h0, 0)
        has_ht = gl.where(mine, has_ht, 0)
    state = (i.to(gl.int64) * H + h) * (K * V)
    dt: gl.constexpr = td.dtype
    wide: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    kds = gl.allocate_shared_memory(dt, [N, 32, K], wide)
    kus = gl.allocate_shared_memory(dt, [N, 32, K], wide)
    vs = gl.allocate_shared_memory(dt, [NC * N, 32, 64], wide)
    tbs = gl.allocate_shared_memory(dt, [N, 32, 32], half)
    es = gl.allocate_shared_memory(gl.float32, [N, 1, K], flat)
    qds = kds
    as_ = tbs
    os = vs
    Ss = kds
    Us = kds
    if OUT:
        qds = gl.allocate_shared_memory(dt, [N, 32, K], wide)
        as_ = gl.allocate_shared_memory(dt, [N, 32, 32], half)
        os = gl.allocate_shared_memory(dt, [NC, 32, 64], wide)
    if SAVE:
        Ss = gl.allocate_shared_memory(dt, [64, K], wide)
        Us = gl.allocate_shared_memory(dt, [64, 32], half)
    bars = ring(N, NC)
    fence_async_shared()
    gl.thread_barrier()
    # Constants stay constants only in tuples that are written out.
    if NC == 2:
        gl.warp_specialize(
            [
                (_compute, (bars, kds, kus, qds, tbs, as_, vs, es, os, Ss, Us, o, od, Sd, Ud, h0, ht, bos, first,
                            length, h, H, v0, n, state, has_h0, has_ht, long, K, V, OUT, SAVE, VFIRST, TAIL, WATCH,
                            N, NC, 0)),
                (_compute, (bars, kds, kus, qds, tbs, as_, vs, es, os, Ss, Us, o, od, Sd, Ud, h0, ht, bos, first,
                            length, h, H, v0, n, state, has_h0, has_ht, long, K, V, OUT, SAVE, VFIRST, TAIL, WATCH,
                            N, NC, 1)),
                (_copy, (bars, kds, kus, qds, tbs, as_, vs, es, td, md, vd, ed, bos, first, h, H, v0, n, K, V, NM, OUT,
                         N, NC)),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_compute, (bars, kds, kus, qds, tbs, as_, vs, es, os, Ss, Us, o, od, Sd, Ud, h0, ht, bos, first,
                            length, h, H, v0, n, state, has_h0, has_ht, long, K, V, OUT, SAVE, VFIRST, TAIL, WATCH,
                            N, NC, 0)),
                (_copy, (bars, kds, kus, qds, tbs, as_, vs, es, td, md, vd, ed, bos, first, h, H, v0, n, K, V, NM, OUT,
                         N, NC)),
            ],
            [1],
            [40],
        )  # fmt: skip
