# SPDX-License-Identifier: MIT
# mypy: ignore-errors
# ruff: noqa: SIM102  (a compile-time and a run-time condition are two statements)
"""`scalar_reverse` with a warp that copies and groups that compute; see `scalar_groups`.

What a step has done with before it ends has a ring of its own: q, the gradients of the output and A, with a read key
also k and the scalars. In the other are T and what the state's update reads. Where K is above 128, q has one place for
itself: there is no room for two, and it is read late and let go early.
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
from fla.ops._delta.kernels.groups_watch import judge, watch


@gluon.jit
def _copy(
    first_bars, rest_bars, own_bars, rs, qs, ks, dos, ts, as_, ss, qd, kd, pd, dod, Td, Ad, scd, tile, row, h, hk, HV,
    v0, n,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, READ: gl.constexpr, NA: gl.constexpr, NB: gl.constexpr,
    NC: gl.constexpr,
):  # fmt: skip
    B: gl.constexpr = 64 if K > 128 else K
    OWN: gl.constexpr = K > 128
    a = 0
    pa = 1
    b = 0
    pb = 1
    po = 1
    early: gl.constexpr = 2 * C * (64 * NC + (0 if OWN else K) + C) + (2 * C * K + 16 * C if READ else 0)
    late: gl.constexpr = 2 * C * (K + C) + (0 if READ else 16 * C)
    for _ in range(n):
        full = first_bars.index(a)
        other = rest_bars.index(b)
        mbarrier.wait(first_bars.index(NA + a), pa)
        mbarrier.expect(full, early)
        if READ:
            bring(kd, row, hk, full, ks, a, K, B)
            tma.async_copy_global_to_shared(scd, [tile * 8, 0], full, ss.index(a))
        tma.async_copy_global_to_shared(dod, [row, h * V + v0], full, dos.index(NC * a))
        if NC == 2:
            tma.async_copy_global_to_shared(dod, [row, h * V + v0 + 64], full, dos.index(2 * a + 1))
        tma.async_copy_global_to_shared(Ad, [tile * C, 0], full, as_.index(a))
        if not OWN:
            bring(qd, row, hk, full, qs, a, K, B)
        mbarrier.wait(rest_bars.index(NB + b), pb)
        mbarrier.expect(other, late)
        if READ:
            bring(pd, row, hk, other, rs, b, K, B)
        else:
            bring(kd, row, hk, other, rs, b, K, B)
            tma.async_copy_global_to_shared(scd, [tile * 8, 0], other, ss.index(b))
        tma.async_copy_global_to_shared(Td, [tile * C, 0], other, ts.index(b))
        if OWN:
            mbarrier.wait(own_bars.index(1), po)
            mbarrier.expect(own_bars.index(0), 2 * C * K)
            bring(qd, row, hk, own_bars.index(0), qs, 0, K, B)
            po ^= 1
        a, pa = onward(a, pa, NA)
        b, pb = onward(b, pb, NB)
        row -= C
        tile -= HV


@gluon.jit
def _compute(
    first_bars, rest_bars, own_bars, rs, qs, ks, dos, ts, as_, ss, Xs, dvs, dv, dvd, Xd, sc, dht, dh0, tile, row, left,
    h, HV, v0, n, state, has_dht, has_dh0, long,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, READ: gl.constexpr, VFIRST: gl.constexpr, TAIL: gl.constexpr,
    WATCH: gl.constexpr, NA: gl.constexpr, NB: gl.constexpr, NC: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    dt: gl.constexpr = rs.dtype
    # As in `scalar_groups`.
    B: gl.constexpr = 64 if K > 128 else K
    P: gl.constexpr = K // B
    OWN: gl.constexpr = K > 128
    big: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, B, 16])
    small: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C, 16])
    left_s: gl.constexpr = gl.DotOperandLayout(0, small, 2)
    left_b: gl.constexpr = gl.DotOperandLayout(0, big, 2)
    v0 += 64 * W
    S = blocks_in(dht + state, has_dht, v0, K, V, B, VFIRST, big)
    zero = gl.zeros([64, C], gl.float32, layout=small)
    if WATCH:
        top = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, small))
    a = 0
    pa = 0
    b = 0
    pb = 0
    po = 0
    G = sc + 3 * C + C - 1
    last = gl.load(G + tile.to(gl.int64) * (8 * C), mask=n > 0, other=0.0)
    for t in range(n):
        eg = gl.exp2(last)
        after = gl.where(t + 1 < n, tile - HV, tile)
        last = gl.load(G + after.to(gl.int64) * (8 * C))
        Sb = S[0].to(dt)
        mbarrier.wait(first_bars.index(a), pa)
        if not READ:
            mbarrier.wait(rest_bars.index(b), pb)
        if TAIL:
            # Where sums run over tokens, rows past the end count for nothing.
            if left < C:
                clear_rows(dos.index(NC * a + W), left, 64)
                if READ:
                    clear_rows(ks.index(a), left, B)
                    mbarrier.wait(rest_bars.index(b), pb)
                if OWN:
                    mbarrier.wait(own_bars.index(0), po)
                for j in gl.static_range(P):
                    clear_rows(qs.index((0 if OWN else P * a) + j), left, B)
                    clear_rows(rs.index(P * b + j), left, B)
        dT = dos.index(NC * a + W).permute((1, 0))
        Sa = gl.convert_layout(Sb, left_s)
        if READ:
            x = warpgroup_mma(Sa, ks.index(a).permute((1, 0)), zero, use_acc=False, is_async=True)
            factors = ss.index(a)
        else:
            x = warpgroup_mma(Sa, rs.index(P * b).permute((1, 0)), zero, use_acc=False, is_async=True)
            factors = ss.index(b)
        if P == 1:
            y = warpgroup_mma(dT, as_.index(a), zero, use_acc=False, is_async=True)
            cq = factors.slice(0, 1, dim=0).load(small)
            dq = gl.convert_layout((dT.load(small).to(gl.float32) * cq).to(dt), left_b)
        # Earlier copies out of these buffers have been read.
        tma.store_wait(0)
        gl.thread_barrier()
        send(Sb, Xs.index((2 if P > 1 else 1) * W), Xd, tile * V + v0, 0)
        if P > 1:
            for j in gl.static_range(1, P):
                x = warpgroup_mma_wait(0, deps=[x])
                # It is there: the branch keeps an operand from being made before the one before is done with.
                mbarrier.wait(first_bars.index(a), pa)
                Sb = S[j].to(dt)
                Sa = gl.convert_layout(Sb, left_s)
                x = warpgroup_mma(Sa, rs.index(P * b + j).permute((1, 0)), x, is_async=True)
                if j > 1:
                    tma.store_wait(1)
                    gl.thread_barrier()
                send(Sb, Xs.index(2 * W + j % 2), Xd, tile * V + v0, j * B)
            x = warpgroup_mma_wait(0, deps=[x])
            x = x * factors.slice(2, 1, dim=0).load(small)
            x = warpgroup_mma(dT, as_.index(a), x, is_async=True)
            S = scaled(S, eg, P)
            mbarrier.wait(own_bars.index(0), po)
            cq = factors.slice(0, 1, dim=0).load(small)
            dq = gl.convert_layout((dT.load(small).to(gl.float32) * cq).to(dt), left_b)
            S = updated(dq, qs, 0, S, P)
            x = warpgroup_mma_wait(P, deps=[x])
            r = gl.convert_layout(x.to(dt), left_s)
            u = warpgroup_mma(r, ts.index(b), zero, use_acc=False, is_async=True)
            u = warpgroup_mma_wait(0, deps=[u])
            ck = factors.slice(1, 1, dim=0).load(small)
            w = gl.convert_layout((u * -ck).to(dt), left_b)
            S = waited(S, P)
            po ^= 1
        else:
            S = scaled(S, eg, P)
            S = updated(dq, qs, a, S, P)
            x, y = warpgroup_mma_wait(1, deps=[x, y])
            # Loaded after the wait, so that nothing that needs the products comes before it.
            cu = factors.slice(2, 1, dim=0).load(small)
            r = gl.convert_layout((y + x * cu).to(dt), left_s)
            if READ:
                mbarrier.wait(rest_bars.index(b), pb)
            u = warpgroup_mma(r, ts.index(b), zero, use_acc=False, is_async=True)
            u = warpgroup_mma_wait(0, deps=[u])
            S = waited(S, P)
            ck = factors.slice(1, 1, dim=0).load(small)
            if not READ:
                mbarrier.arrive(first_bars.index(NA + a), count=1)
            w = gl.convert_layout((u * -ck).to(dt), left_b)
        S = updated(w, rs, b, S, P)
        if WATCH:
            top = watch(top, u)
        send_rows(u.to(dt), dvs.index(W), dv, dvd, row, left, h, HV, v0, V, C, TAIL)
        if READ or P > 1:
            # Behind a barrier of the group: one thread says so for all, and each warp loaded the factors for itself.
            mbarrier.arrive(first_bars.index(NA + a), count=1)
        if OWN:
            mbarrier.arrive(own_bars.index(1), count=1)
        S = waited(S, P)
        mbarrier.arrive(rest_bars.index(NB + b), count=1)
        a, pa = onward(a, pa, NA)
        b, pb = onward(b, pb, NB)
        row -= C
        left = C
        tile -= HV
    tma.store_wait(0)
    if has_dh0 != 0:
        blocks_out(S, dh0 + state, v0, K, V, B, VFIRST, big)
    if WATCH:
        judge(long, top, together(S, P), 3, big)


@gluon.jit(do_not_specialize=["T", "NT", "H", "HV", "has_dht", "has_dh0"])
def groups_reverse(
    sc, qd, kd, pd, dod, Td, Ad, scd, dv, dvd, Xd, dht, dh0, cu, offsets, T, NT, H, HV, has_dht, has_dh0, long,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, READ: gl.constexpr, VFIRST: gl.constexpr, VARLEN: gl.constexpr,
    TAIL: gl.constexpr, WATCH: gl.constexpr, NA: gl.constexpr, NB: gl.constexpr, NC: gl.constexpr,
):  # fmt: skip
    """One program a block of ``64 NC`` columns of V, value head and sequence; writes the gradient of the state after
    each chunk, ``X^T`` [V, K], and dv. READ: ``pd`` is the read key. WATCH: float16, whose range is watched. NA, NB:
    places of the two rings. READ is not for K above 128."""
    gl.static_assert(K <= 128 or not READ)
    v0, h, i, row, length, first = block_of(cu, offsets, T, NT, HV, V, 64 * NC, VARLEN)
    hk = h // (HV // H)
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
    B: gl.constexpr = 64 if K > 128 else K
    P: gl.constexpr = K // B
    wide: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    qs = gl.allocate_shared_memory(dt, [P if K > 128 else NA, C, B], wide)
    dos = gl.allocate_shared_memory(dt, [NC * NA, C, 64], wide)
    as_ = gl.allocate_shared_memory(dt, [NA, C, C], wide)
    rs = gl.allocate_shared_memory(dt, [P * NB, C, B], wide)
    ts = gl.allocate_shared_memory(dt, [NB, C, C], wide)
    if READ:
        ks = gl.allocate_shared_memory(dt, [NA, C, K], wide)
        ss = gl.allocate_shared_memory(gl.float32, [NA, 4, C], flat)
    else:
        ks = rs
        ss = gl.allocate_shared_memory(gl.float32, [NB, 4, C], flat)
    Xs = gl.allocate_shared_memory(dt, [2 * NC if P > 1 else NC, 64, B], wide)
    dvs = gl.allocate_shared_memory(dt, [NC, C, 64], wide)
    first_bars = ring(NA, NC)
    rest_bars = ring(NB, NC)
    own_bars = rest_bars
    if K > 128:
        own_bars = ring(1, NC)
    fence_async_shared()
    gl.thread_barrier()
    # Constants stay constants only in tuples that are written out.
    if NC == 2:
        gl.warp_specialize(
            [
                (_compute, (first_bars, rest_bars, own_bars, rs, qs, ks, dos, ts, as_, ss, Xs, dvs, dv, dvd, Xd, sc,
                            dht, dh0, tile, row, left, h, HV, v0, n, state, has_dht, has_dh0, long, K, V, C, READ,
                            VFIRST, TAIL, WATCH, NA, NB, NC, 0)),
                (_compute, (first_bars, rest_bars, own_bars, rs, qs, ks, dos, ts, as_, ss, Xs, dvs, dv, dvd, Xd, sc,
                            dht, dh0, tile, row, left, h, HV, v0, n, state, has_dht, has_dh0, long, K, V, C, READ,
                            VFIRST, TAIL, WATCH, NA, NB, NC, 1)),
                (_copy, (first_bars, rest_bars, own_bars, rs, qs, ks, dos, ts, as_, ss, qd, kd, pd, dod, Td, Ad, scd,
                         tile, row, h, hk, HV, v0, n, K, V, C, READ, NA, NB, NC)),
            ],
            [4, 1],
            [240, 24] if K > 128 else [232, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_compute, (first_bars, rest_bars, own_bars, rs, qs, ks, dos, ts, as_, ss, Xs, dvs, dv, dvd, Xd, sc,
                            dht, dh0, tile, row, left, h, HV, v0, n, state, has_dht, has_dh0, long, K, V, C, READ,
                            VFIRST, TAIL, WATCH, NA, NB, NC, 0)),
                (_copy, (first_bars, rest_bars, own_bars, rs, qs, ks, dos, ts, as_, ss, qd, kd, pd, dod, Td, Ad, scd,
                         tile, row, h, hk, HV, v0, n, K, V, C, READ, NA, NB, NC)),
            ],
            [1],
            [40],
        )  # fmt: skip
