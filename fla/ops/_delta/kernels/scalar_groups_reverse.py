# SPDX-License-Identifier: MIT
# mypy: ignore-errors
# ruff: noqa: SIM102  (a compile-time and a run-time condition are two statements)
"""`scalar_reverse` with a warp that copies and groups that compute; see `scalar_groups`.

What a step has done with before it ends has a ring of its own: q, the gradients of the output and A, with a read key
also k and the scalars. In the other are T and what the state's update reads.
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
from fla.ops._common.groups_kernels import clear_rows, onward, places, ring, sequence_of, store_left
from fla.ops._delta.kernels.groups_watch import judge, watch


@gluon.jit
def _copy(
    first_bars, rest_bars, rs, qs, ks, dos, ts, as_, ss, qd, kd, pd, dod, Td, Ad, scd, tile, row, h, hk, HV, v0, n,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, READ: gl.constexpr, NA: gl.constexpr, NB: gl.constexpr,
    NC: gl.constexpr,
):  # fmt: skip
    a = 0
    pa = 1
    b = 0
    pb = 1
    early: gl.constexpr = 2 * C * (64 * NC + K + C) + (2 * C * K + 16 * C if READ else 0)
    late: gl.constexpr = 2 * C * (K + C) + (0 if READ else 16 * C)
    for _ in range(n):
        full = first_bars.index(a)
        other = rest_bars.index(b)
        mbarrier.wait(first_bars.index(NA + a), pa)
        mbarrier.expect(full, early)
        if READ:
            tma.async_copy_global_to_shared(kd, [row, hk * K], full, ks.index(a))
            tma.async_copy_global_to_shared(scd, [tile * 8, 0], full, ss.index(a))
        tma.async_copy_global_to_shared(dod, [row, h * V + v0], full, dos.index(NC * a))
        if NC == 2:
            tma.async_copy_global_to_shared(dod, [row, h * V + v0 + 64], full, dos.index(2 * a + 1))
        tma.async_copy_global_to_shared(Ad, [tile * C, 0], full, as_.index(a))
        tma.async_copy_global_to_shared(qd, [row, hk * K], full, qs.index(a))
        mbarrier.wait(rest_bars.index(NB + b), pb)
        mbarrier.expect(other, late)
        if READ:
            tma.async_copy_global_to_shared(pd, [row, hk * K], other, rs.index(b))
        else:
            tma.async_copy_global_to_shared(kd, [row, hk * K], other, rs.index(b))
            tma.async_copy_global_to_shared(scd, [tile * 8, 0], other, ss.index(b))
        tma.async_copy_global_to_shared(Td, [tile * C, 0], other, ts.index(b))
        a, pa = onward(a, pa, NA)
        b, pb = onward(b, pb, NB)
        row -= C
        tile -= HV


@gluon.jit
def _compute(
    first_bars, rest_bars, rs, qs, ks, dos, ts, as_, ss, Xs, dvs, dv, dvd, Xd, sc, dht, dh0, tile, row, left, h, HV,
    v0, n, state, has_dht, has_dh0, long,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, READ: gl.constexpr, VFIRST: gl.constexpr, TAIL: gl.constexpr,
    WATCH: gl.constexpr, NA: gl.constexpr, NB: gl.constexpr, NC: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    dt: gl.constexpr = rs.dtype
    big: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, K, 16])
    small: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C, 16])
    left_s: gl.constexpr = gl.DotOperandLayout(0, small, 2)
    left_b: gl.constexpr = gl.DotOperandLayout(0, big, 2)
    v0 += 64 * W
    S = gl.zeros([64, K], gl.float32, layout=big)
    if has_dht != 0:
        S = gl.load(dht + state + places(v0, K, V, VFIRST, big)).to(gl.float32)
    zero = gl.zeros([64, C], gl.float32, layout=small)
    if WATCH:
        top = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, small))
    a = 0
    pa = 0
    b = 0
    pb = 0
    G = sc + 3 * C + C - 1
    last = gl.load(G + tile.to(gl.int64) * (8 * C), mask=n > 0, other=0.0)
    for t in range(n):
        eg = gl.exp2(last)
        after = gl.where(t + 1 < n, tile - HV, tile)
        last = gl.load(G + after.to(gl.int64) * (8 * C))
        Sb = S.to(dt)
        mbarrier.wait(first_bars.index(a), pa)
        if not READ:
            mbarrier.wait(rest_bars.index(b), pb)
        if TAIL:
            # Where sums run over tokens, rows past the end count for nothing.
            if left < C:
                clear_rows(dos.index(NC * a + W), left, 64)
                clear_rows(qs.index(a), left, K)
                if READ:
                    clear_rows(ks.index(a), left, K)
                    mbarrier.wait(rest_bars.index(b), pb)
                clear_rows(rs.index(b), left, K)
        dT = dos.index(NC * a + W).permute((1, 0))
        Sa = gl.convert_layout(Sb, left_s)
        if READ:
            x = warpgroup_mma(Sa, ks.index(a).permute((1, 0)), zero, use_acc=False, is_async=True)
            factors = ss.index(a)
        else:
            x = warpgroup_mma(Sa, rs.index(b).permute((1, 0)), zero, use_acc=False, is_async=True)
            factors = ss.index(b)
        y = warpgroup_mma(dT, as_.index(a), zero, use_acc=False, is_async=True)
        cq = factors.slice(0, 1, dim=0).load(small)
        dq = gl.convert_layout((dT.load(small).to(gl.float32) * cq).to(dt), left_b)
        # Earlier copies out of these buffers have been read.
        tma.store_wait(0)
        gl.thread_barrier()
        Xs.index(W).store(Sb)
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(Xd, [tile * V + v0, 0], Xs.index(W))
        S = S * eg
        S = warpgroup_mma(dq, qs.index(a), S, is_async=True)
        x, y = warpgroup_mma_wait(1, deps=[x, y])
        # Loaded after the wait, so that nothing that needs the products comes before it.
        cu = factors.slice(2, 1, dim=0).load(small)
        r = gl.convert_layout((y + x * cu).to(dt), left_s)
        if READ:
            mbarrier.wait(rest_bars.index(b), pb)
        u = warpgroup_mma(r, ts.index(b), zero, use_acc=False, is_async=True)
        S, u = warpgroup_mma_wait(0, deps=[S, u])
        ck = factors.slice(1, 1, dim=0).load(small)
        if not READ:
            mbarrier.arrive(first_bars.index(NA + a), count=1)
        w = gl.convert_layout((u * -ck).to(dt), left_b)
        S = warpgroup_mma(w, rs.index(b), S, is_async=True)
        if WATCH:
            top = watch(top, u)
        dvs.index(W).permute((1, 0)).store(u.to(dt))
        if TAIL:
            if left < C:
                store_left(dvs.index(W), dv, row, left, h, HV, v0, V)
            else:
                fence_async_shared()
                gl.thread_barrier()
                tma.async_copy_shared_to_global(dvd, [row, h * V + v0], dvs.index(W))
        else:
            fence_async_shared()
            gl.thread_barrier()
            tma.async_copy_shared_to_global(dvd, [row, h * V + v0], dvs.index(W))
        if READ:
            # Behind a barrier of the group: one thread says so for all, and each warp loaded the factors for itself.
            mbarrier.arrive(first_bars.index(NA + a), count=1)
        S = warpgroup_mma_wait(0, deps=[S])
        mbarrier.arrive(rest_bars.index(NB + b), count=1)
        a, pa = onward(a, pa, NA)
        b, pb = onward(b, pb, NB)
        row -= C
        left = C
        tile -= HV
    tma.store_wait(0)
    if has_dh0 != 0:
        gl.store(dh0 + state + places(v0, K, V, VFIRST, big), S)
    if WATCH:
        judge(long, top, S, 3, big)


@gluon.jit(do_not_specialize=["T", "NT", "H", "HV", "has_dht", "has_dh0"])
def groups_reverse(
    sc, qd, kd, pd, dod, Td, Ad, scd, dv, dvd, Xd, dht, dh0, cu, offsets, T, NT, H, HV, has_dht, has_dh0, long,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, READ: gl.constexpr, VFIRST: gl.constexpr, VARLEN: gl.constexpr,
    TAIL: gl.constexpr, WATCH: gl.constexpr, NA: gl.constexpr, NB: gl.constexpr, NC: gl.constexpr,
):  # fmt: skip
    """One program a block of ``64 NC`` columns of V, value head and sequence; writes the gradient of the state after
    each chunk, ``X^T`` [V, K], and dv. READ: ``pd`` is the read key. WATCH: float16, whose range is watched. NA, NB:
    places of the two rings."""
    pid = gl.program_id(0)
    NV: gl.constexpr = V // (64 * NC)
    v0 = (pid % NV) * (64 * NC)
    h = (pid // NV) % HV
    i = pid // (NV * HV)
    hk = h // (HV // H)
    row, length, first = sequence_of(cu, offsets, i, T, NT, VARLEN)
    n = (length + C - 1) // C
    if WATCH:
        # Where the form in float32 does the work nothing is read or written.
        mine = gl.load(long) == 0
        n = gl.where(mine, n, 0)
        has_dht = gl.where(mine, has_dht, 0)
        has_dh0 = gl.where(mine, has_dh0, 0)
    row += (n - 1) * C
    left = length - (n - 1) * C
    tile = (first + n - 1) * HV + h
    state = (i.to(gl.int64) * HV + h) * (K * V)
    dt: gl.constexpr = Td.dtype
    wide: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    qs = gl.allocate_shared_memory(dt, [NA, C, K], wide)
    dos = gl.allocate_shared_memory(dt, [NC * NA, C, 64], wide)
    as_ = gl.allocate_shared_memory(dt, [NA, C, C], wide)
    rs = gl.allocate_shared_memory(dt, [NB, C, K], wide)
    ts = gl.allocate_shared_memory(dt, [NB, C, C], wide)
    if READ:
        ks = gl.allocate_shared_memory(dt, [NA, C, K], wide)
        ss = gl.allocate_shared_memory(gl.float32, [NA, 4, C], flat)
    else:
        ks = rs
        ss = gl.allocate_shared_memory(gl.float32, [NB, 4, C], flat)
    Xs = gl.allocate_shared_memory(dt, [NC, 64, K], wide)
    dvs = gl.allocate_shared_memory(dt, [NC, C, 64], wide)
    first_bars = ring(NA, NC)
    rest_bars = ring(NB, NC)
    fence_async_shared()
    gl.thread_barrier()
    # Constants stay constants only in tuples that are written out.
    if NC == 2:
        gl.warp_specialize(
            [
                (_compute, (first_bars, rest_bars, rs, qs, ks, dos, ts, as_, ss, Xs, dvs, dv, dvd, Xd, sc, dht, dh0,
                            tile, row, left, h, HV, v0, n, state, has_dht, has_dh0, long, K, V, C, READ, VFIRST, TAIL,
                            WATCH, NA, NB, NC, 0)),
                (_compute, (first_bars, rest_bars, rs, qs, ks, dos, ts, as_, ss, Xs, dvs, dv, dvd, Xd, sc, dht, dh0,
                            tile, row, left, h, HV, v0, n, state, has_dht, has_dh0, long, K, V, C, READ, VFIRST, TAIL,
                            WATCH, NA, NB, NC, 1)),
                (_copy, (first_bars, rest_bars, rs, qs, ks, dos, ts, as_, ss, qd, kd, pd, dod, Td, Ad, scd, tile, row,
                         h, hk, HV, v0, n, K, V, C, READ, NA, NB, NC)),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_compute, (first_bars, rest_bars, rs, qs, ks, dos, ts, as_, ss, Xs, dvs, dv, dvd, Xd, sc, dht, dh0,
                            tile, row, left, h, HV, v0, n, state, has_dht, has_dh0, long, K, V, C, READ, VFIRST, TAIL,
                            WATCH, NA, NB, NC, 0)),
                (_copy, (first_bars, rest_bars, rs, qs, ks, dos, ts, as_, ss, qd, kd, pd, dod, Td, Ad, scd, tile, row,
                         h, hk, HV, v0, n, K, V, C, READ, NA, NB, NC)),
            ],
            [1],
            [40],
        )  # fmt: skip
