# SPDX-License-Identifier: MIT
# mypy: ignore-errors
# ruff: noqa: SIM102  (a compile-time and a run-time condition are two statements)
"""State passes of the scalar-decay delta rule with a warp that copies and groups of warps that compute, for Hopper.

What `scalar_scan` does, in Gluon: each group of four warps holds 64 columns of V and goes its own pace, products are
waited for where they are needed, and a warp of its own keeps tiles on their way, so that no group waits for another or
for an address.

Two rings of tiles in shared memory: with a read key its tiles and those of q are done with early in a step and have a
ring of their own; else all tiles of a step come and go together. One barrier for each place says that its tiles are
there, another that all groups are done with them.

A ragged last chunk is a step like others. Rows past its end, which may hold anything, are cleared in shared memory
where a sum runs over tokens.
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
from fla.ops._common.groups_kernels import (
    block_of,
    blocks_in,
    blocks_out,
    bring,
    clear_rows,
    onward,
    ring,
    scaled,
    send,
    send_rows,
    together,
    updated,
    waited,
)
from fla.ops._delta.kernels.groups_watch import judge, saturate, watch


@gluon.jit
def _copy(
    first_bars, rest_bars, rs, qs, ks, vs, ts, as_, ss, qd, kd, pd, vd, Td, Ad, scd, tile, row, h, hk, HV, v0, n,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, OUT: gl.constexpr, READ: gl.constexpr,
    NA: gl.constexpr, NB: gl.constexpr, NC: gl.constexpr,
):  # fmt: skip
    B: gl.constexpr = 64 if K > 128 else K
    a = 0
    pa = 1
    b = 0
    pb = 1
    rest: gl.constexpr = 2 * C * (64 * NC + C) + 16 * C + (2 * C * C if OUT else 0) + (2 * C * K if READ else 0)
    for _ in range(n):
        full = first_bars.index(a)
        mbarrier.wait(first_bars.index(NA + a), pa)
        mbarrier.expect(full, 2 * C * K * (2 if OUT else 1) + (0 if READ else rest))
        if READ:
            bring(pd, row, hk, full, rs, a, K, B)
        else:
            bring(kd, row, hk, full, rs, a, K, B)
        if OUT:
            bring(qd, row, hk, full, qs, a, K, B)
        if READ:
            full = rest_bars.index(b)
            mbarrier.wait(rest_bars.index(NB + b), pb)
            mbarrier.expect(full, rest)
        tma.async_copy_global_to_shared(vd, [row, h * V + v0], full, vs.index(NC * b))
        if NC == 2:
            tma.async_copy_global_to_shared(vd, [row, h * V + v0 + 64], full, vs.index(2 * b + 1))
        tma.async_copy_global_to_shared(scd, [tile * 8, 0], full, ss.index(b))
        tma.async_copy_global_to_shared(Td, [tile * C, 0], full, ts.index(b))
        if READ:
            bring(kd, row, hk, full, ks, b, K, B)
        if OUT:
            tma.async_copy_global_to_shared(Ad, [tile * C, 0], full, as_.index(b))
        a, pa = onward(a, pa, NA)
        b, pb = onward(b, pb, NB)
        row += C
        tile += HV


@gluon.jit
def _compute(
    first_bars, rest_bars, rs, qs, ks, vs, ts, as_, ss, os, Ss, Us, o, od, Sd, Ud, sc, h0, ht, tile, row, left, h, HV,
    v0, n, state, has_h0, has_ht, long,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, OUT: gl.constexpr, SAVE: gl.constexpr, READ: gl.constexpr,
    VFIRST: gl.constexpr, TAIL: gl.constexpr, WATCH: gl.constexpr, NA: gl.constexpr, NB: gl.constexpr,
    NC: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    dt: gl.constexpr = rs.dtype
    # The state is held in blocks of channels, as operands of which only so many fit in registers at a time.
    B: gl.constexpr = 64 if K > 128 else K
    P: gl.constexpr = K // B
    big: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, B, 16])
    small: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C, 16])
    left_s: gl.constexpr = gl.DotOperandLayout(0, small, 2)
    left_b: gl.constexpr = gl.DotOperandLayout(0, big, 2)
    v0 += 64 * W
    S = blocks_in(h0 + state, has_h0, v0, K, V, B, VFIRST, big)
    zero = gl.zeros([64, C], gl.float32, layout=small)
    token = gl.arange(0, C, layout=gl.SliceLayout(0, small))
    if WATCH:
        top = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, small))
    a = 0
    pa = 0
    b = 0
    pb = 0
    # The decay of a chunk is its last cumulative one; it comes a step ahead.
    G = sc + 3 * C + C - 1
    last = gl.load(G + tile.to(gl.int64) * (8 * C), mask=n > 0, other=0.0)
    for t in range(n):
        x = zero
        y = zero
        eg = gl.exp2(last)
        after = gl.where(t + 1 < n, tile + HV, tile)
        last = gl.load(G + after.to(gl.int64) * (8 * C))
        for j in gl.static_range(P):
            Sb = S[j].to(dt)
            mbarrier.wait(first_bars.index(a), pa)
            Sa = gl.convert_layout(Sb, left_s)
            x = warpgroup_mma(Sa, rs.index(P * a + j).permute((1, 0)), x, use_acc=j > 0, is_async=True)
            if OUT:
                y = warpgroup_mma(Sa, qs.index(P * a + j).permute((1, 0)), y, use_acc=j > 0, is_async=True)
            if SAVE:
                if j == 0:
                    # Earlier copies out of these buffers have been read.
                    tma.store_wait(0)
                    gl.thread_barrier()
                send(Sb, Ss.index(P * W + j), Sd, tile * V + v0, j * B)
            if P > 1:
                # Before the next operand is made. There is no room for values before the products are there, either.
                if OUT:
                    x, y = warpgroup_mma_wait(0, deps=[x, y])
                else:
                    x = warpgroup_mma_wait(0, deps=[x])
        if READ:
            mbarrier.wait(rest_bars.index(b), pb)
        if TAIL:
            if left < C:
                if READ:
                    clear_rows(ks.index(b), left, B)
                else:
                    for j in gl.static_range(P):
                        clear_rows(rs.index(P * a + j), left, B)
        if P > 1:
            # One after the other, with a branch between: factors and values do not fit in registers at once.
            x = x * ss.index(b).slice(1, 1, dim=0).load(small)
            mbarrier.wait(first_bars.index(a), pa)
            r = vs.index(NC * b + W).permute((1, 0)).load(small).to(gl.float32) - x
        else:
            vt = vs.index(NC * b + W).permute((1, 0)).load(small).to(gl.float32)
            if OUT:
                x = warpgroup_mma_wait(1, deps=[x])
            else:
                x = warpgroup_mma_wait(0, deps=[x])
            # Loaded after the wait, so that nothing that needs the product comes before it.
            ck = ss.index(b).slice(1, 1, dim=0).load(small)
            r = vt - x * ck
        if TAIL:
            r = gl.where((token < left)[None, :], r, zero)
        u = warpgroup_mma(
            gl.convert_layout(r.to(dt), left_s), ts.index(b).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        S = scaled(S, eg, P)
        if OUT and P == 1:
            y, u = warpgroup_mma_wait(0, deps=[y, u])
        else:
            u = warpgroup_mma_wait(0, deps=[u])
        cu = ss.index(b).slice(2, 1, dim=0).load(small)
        w = gl.convert_layout((u * cu).to(dt), left_b)
        if READ:
            mbarrier.arrive(first_bars.index(NA + a), count=1)
            S = updated(w, ks, b, S, P)
        else:
            S = updated(w, rs, a, S, P)
        if OUT:
            if P > 1:
                S = waited(S, P)
                mbarrier.wait(first_bars.index(a), pa)
            y = y * ss.index(b).slice(0, 1, dim=0).load(small)
            ub = gl.convert_layout(u.to(dt), left_s)
            y = warpgroup_mma(ub, as_.index(b).permute((1, 0)), y, is_async=True)
        if SAVE:
            send(u.to(dt), Us.index(W), Ud, tile * V + v0, 0)
        if OUT:
            y = warpgroup_mma_wait(0, deps=[y])
        if P == 1 or not OUT:
            S = waited(S, P)
        if READ:
            mbarrier.arrive(rest_bars.index(NB + b), count=1)
        else:
            mbarrier.arrive(first_bars.index(NA + a), count=1)
        if OUT:
            if WATCH:
                if TAIL:
                    y = gl.where((token < left)[None, :], y, zero)
                top = watch(top, y)
                y = saturate(y)
            tma.store_wait(0)
            gl.thread_barrier()
            send_rows(y.to(dt), os.index(W), o, od, row, left, h, HV, v0, V, C, TAIL)
        a, pa = onward(a, pa, NA)
        b, pb = onward(b, pb, NB)
        row += C
        left -= C
        tile += HV
    tma.store_wait(0)
    if has_ht != 0:
        blocks_out(S, ht + state, v0, K, V, B, VFIRST, big)
    if WATCH and OUT:
        judge(long, top, together(S, P), 1, big)


@gluon.jit(do_not_specialize=["T", "NT", "H", "HV", "has_h0", "has_ht"])
def groups_scan(
    sc, qd, kd, pd, vd, Td, Ad, scd, o, od, Sd, Ud, h0, ht, cu, offsets, T, NT, H, HV, has_h0, has_ht, long,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, OUT: gl.constexpr, SAVE: gl.constexpr, READ: gl.constexpr,
    VFIRST: gl.constexpr, VARLEN: gl.constexpr, TAIL: gl.constexpr, WATCH: gl.constexpr, NA: gl.constexpr,
    NB: gl.constexpr, NC: gl.constexpr,
):  # fmt: skip
    """One program a block of ``64 NC`` columns of V, value head and sequence. OUT: write o. SAVE: write the state
    before each chunk, ``S^T`` [V, K], and ``u^T`` [V, C]. READ: ``pd`` is the read key. WATCH: float16, whose range is
    watched; see `common`. NA, NB: places of the two rings; equal without READ, which is not for K above 128."""
    gl.static_assert(K <= 128 or not READ)
    v0, h, i, row, length, first = block_of(cu, offsets, T, NT, HV, V, 64 * NC, VARLEN)
    hk = h // (HV // H)
    tile = first * HV + h
    n = (length + C - 1) // C
    if WATCH:
        # Where the form in float32 does the work nothing is read or written.
        mine = gl.load(long) == 0
        n = gl.where(mine, n, 0)
        has_h0 = gl.where(mine, has_h0, 0)
        has_ht = gl.where(mine, has_ht, 0)
    state = (i.to(gl.int64) * HV + h) * (K * V)
    dt: gl.constexpr = Td.dtype
    B: gl.constexpr = 64 if K > 128 else K
    P: gl.constexpr = K // B
    wide: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    rs = gl.allocate_shared_memory(dt, [P * NA, C, B], wide)
    ks = rs
    qs = rs
    as_ = rs
    os = rs
    Ss = rs
    Us = rs
    if OUT:
        qs = gl.allocate_shared_memory(dt, [P * NA, C, B], wide)
        as_ = gl.allocate_shared_memory(dt, [NB, C, C], wide)
        os = gl.allocate_shared_memory(dt, [NC, C, 64], wide)
    if READ:
        ks = gl.allocate_shared_memory(dt, [NB, C, K], wide)
    vs = gl.allocate_shared_memory(dt, [NC * NB, C, 64], wide)
    ts = gl.allocate_shared_memory(dt, [NB, C, C], wide)
    ss = gl.allocate_shared_memory(gl.float32, [NB, 4, C], flat)
    if SAVE:
        Ss = gl.allocate_shared_memory(dt, [P * NC, 64, B], wide)
        Us = gl.allocate_shared_memory(dt, [NC, 64, C], wide)
    first_bars = ring(NA, NC)
    rest_bars = ring(NB, NC)
    fence_async_shared()
    gl.thread_barrier()
    # Constants stay constants only in tuples that are written out.
    if NC == 2:
        gl.warp_specialize(
            [
                (_compute, (first_bars, rest_bars, rs, qs, ks, vs, ts, as_, ss, os, Ss, Us, o, od, Sd, Ud, sc, h0, ht,
                            tile, row, length, h, HV, v0, n, state, has_h0, has_ht, long, K, V, C, OUT, SAVE, READ,
                            VFIRST, TAIL, WATCH, NA, NB, NC, 0)),
                (_compute, (first_bars, rest_bars, rs, qs, ks, vs, ts, as_, ss, os, Ss, Us, o, od, Sd, Ud, sc, h0, ht,
                            tile, row, length, h, HV, v0, n, state, has_h0, has_ht, long, K, V, C, OUT, SAVE, READ,
                            VFIRST, TAIL, WATCH, NA, NB, NC, 1)),
                (_copy, (first_bars, rest_bars, rs, qs, ks, vs, ts, as_, ss, qd, kd, pd, vd, Td, Ad, scd, tile, row, h,
                         hk, HV, v0, n, K, V, C, OUT, READ, NA, NB, NC)),
            ],
            [4, 1],
            [240, 24] if K > 128 else [232, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_compute, (first_bars, rest_bars, rs, qs, ks, vs, ts, as_, ss, os, Ss, Us, o, od, Sd, Ud, sc, h0, ht,
                            tile, row, length, h, HV, v0, n, state, has_h0, has_ht, long, K, V, C, OUT, SAVE, READ,
                            VFIRST, TAIL, WATCH, NA, NB, NC, 0)),
                (_copy, (first_bars, rest_bars, rs, qs, ks, vs, ts, as_, ss, qd, kd, pd, vd, Td, Ad, scd, tile, row, h,
                         hk, HV, v0, n, K, V, C, OUT, READ, NA, NB, NC)),
            ],
            [1],
            [40],
        )  # fmt: skip
