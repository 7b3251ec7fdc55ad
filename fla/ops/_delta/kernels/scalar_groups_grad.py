# SPDX-License-Identifier: MIT
# mypy: ignore-errors
"""`scalar_grad` with a warp that copies and two groups of four warps that compute, for Hopper and K = V.

A program takes one chunk after another. With the names of `scalar_grad` one group makes E, Q and dq, the other M, F, R,
W and dk (and dp), so that sums by rows stay within a group; E and the sums q . Q go over through shared memory. Tiles
of a chunk come when their place is free: do, dr and u have two places, states, their gradients and keys one, because
each is done with early enough for the next to arrive. Results leave through the places of do, dr and u.

Whole chunks only; `scalar_grad` does ragged ones.
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
from fla.ops._common.groups_kernels import onward, ring


@gluon.jit
def _chunk(table, tile, T, NT, HV, C: gl.constexpr, VARLEN: gl.constexpr):
    """Head, first row and rows of a chunk."""
    h = tile % HV
    it = tile // HV
    if VARLEN:
        row = gl.load(table + it * 4)
        n = gl.load(table + it * 4 + 1)
    else:
        t0 = (it % NT) * C
        row = (it // NT) * T + t0
        n = gl.minimum(T - t0, C)
    return h, row, n


@gluon.jit
def _copy_chunk(
    vbars, sbars, xbars, kbars, dos, drs, us, ss, Ss, Xs, qs, ks, ps, dod, drd, Ud, scd, Sd, Xd, qd, kd, pd, tile, row,
    h, hk, a, pa, p, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, READ: gl.constexpr,
):  # fmt: skip
    mbarrier.wait(vbars.index(2 + a), pa)
    full = vbars.index(a)
    mbarrier.expect(full, 6 * C * V + 16 * C)
    tma.async_copy_global_to_shared(drd, [row, h * V], full, drs.index(a))
    tma.async_copy_global_to_shared(Ud, [tile * V, 0], full, us.index(a))
    tma.async_copy_global_to_shared(dod, [row, h * V], full, dos.index(a))
    tma.async_copy_global_to_shared(scd, [tile * 8 + 3, 0], full, ss.index(a))
    mbarrier.wait(sbars.index(1), p)
    full = sbars.index(0)
    mbarrier.expect(full, 2 * K * V)
    tma.async_copy_global_to_shared(Sd, [tile * V, 0], full, Ss)
    mbarrier.wait(xbars.index(1), p)
    full = xbars.index(0)
    mbarrier.expect(full, 2 * K * V)
    tma.async_copy_global_to_shared(Xd, [tile * V, 0], full, Xs)
    mbarrier.wait(kbars.index(1), p)
    full = kbars.index(0)
    mbarrier.expect(full, 2 * C * K * (3 if READ else 2))
    tma.async_copy_global_to_shared(kd, [row, hk * K], full, ks)
    if READ:
        tma.async_copy_global_to_shared(pd, [row, hk * K], full, ps)
    tma.async_copy_global_to_shared(qd, [row, hk * K], full, qs)
    a, pa = onward(a, pa, 2)
    return a, pa, p ^ 1


@gluon.jit
def _copy(
    vbars, sbars, xbars, kbars, dos, drs, us, ss, Ss, Xs, qs, ks, ps, dod, drd, Ud, scd, Sd, Xd, qd, kd, pd, table,
    tiles, programs, T, NT, H, HV,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, READ: gl.constexpr, VARLEN: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    a = 0
    pa = 1
    p = 1
    for tile in range(gl.program_id(0), tiles, programs):
        h, row, n = _chunk(table, tile, T, NT, HV, C, VARLEN)
        hk = h // (HV // H)
        if TAIL:
            if n >= C:
                a, pa, p = _copy_chunk(
                    vbars, sbars, xbars, kbars, dos, drs, us, ss, Ss, Xs, qs, ks, ps, dod, drd, Ud, scd, Sd, Xd, qd, kd,
                    pd, tile, row, h, hk, a, pa, p, K, V, C, READ,
                )  # fmt: skip
        else:
            a, pa, p = _copy_chunk(
                vbars, sbars, xbars, kbars, dos, drs, us, ss, Ss, Xs, qs, ks, ps, dod, drd, Ud, scd, Sd, Xd, qd, kd,
                pd, tile, row, h, hk, a, pa, p, K, V, C, READ,
            )  # fmt: skip


@gluon.jit
def _columns(ss, C: gl.constexpr, small: gl.constexpr, FLOOR: gl.constexpr):
    """Cumulative decays and factors of the keys that are written, by columns of [C, C]."""
    G = ss.slice(0, 1, dim=0).load(small)
    rk = ss.slice(2, 1, dim=0).load(small)
    bt = ss.slice(3, 1, dim=0).load(small)
    return G, rk * gl.where(gl.abs(bt) < FLOOR, FLOOR, bt)


@gluon.jit
def _query_chunk(
    vbars, sbars, xbars, kbars, ready, sums, dos, us, ss, Ss, Xs, qs, ks, Es, aQs, sc, dqd, tile, row, h, unscale, a,
    pa, p, again,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, NORM: gl.constexpr, DECAY: gl.constexpr, NE: gl.constexpr,
):  # fmt: skip
    dt: gl.constexpr = qs.dtype
    big: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, K, 16])
    small: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C, 16])
    left_b: gl.constexpr = gl.DotOperandLayout(0, big, 2)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [4, 1], [1, 0])
    ri = gl.arange(0, C, layout=gl.SliceLayout(1, small))
    ci = gl.arange(0, C, layout=gl.SliceLayout(0, small))
    rb = gl.arange(0, C, layout=gl.SliceLayout(1, big))
    sp = sc + tile.to(gl.int64) * (8 * C)
    Gi = gl.load(sp + 3 * C + ri)
    rqi = gl.load(sp + 4 * C + ri)
    cq = gl.load(sp + rb)
    rq = gl.load(sp + 4 * C + rb)
    GL = gl.load(sp + 4 * C - 1)
    mbarrier.wait(vbars.index(a), pa)
    E = warpgroup_mma(
        dos.index(a), us.index(a), gl.zeros([C, C], gl.float32, layout=small), use_acc=False, is_async=True
    )
    mbarrier.wait(sbars.index(0), p)
    Q = warpgroup_mma(
        dos.index(a), Ss, gl.zeros([C, K], gl.float32, layout=big), use_acc=False, is_async=True
    )  # fmt: skip
    # What left through the place of the chunk before has been read.
    tma.store_wait(0)
    gl.thread_barrier()
    mbarrier.arrive(vbars.index(3 - a), count=1, pred=again > 0)
    Gj, col = _columns(ss.index(a), C, small, 1e-20)
    if DECAY == 0:
        dec = gl.where(ri[:, None] >= ci[None, :], rqi[:, None] * col, 0.0)
    else:
        dec = gl.exp2(gl.where(ri[:, None] >= ci[None, :], Gi[:, None] - Gj, -float("inf"))) * col * rqi[:, None]
    E = warpgroup_mma_wait(1, deps=[E])
    Eb = (E * dec).to(dt)
    e = 0
    pe = p
    if NE == 2:
        e = a
        pe = pa
    mbarrier.wait(ready.index(NE + e), pe ^ 1)
    Es.index(e).store(Eb)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(ready.index(e), count=1)
    left = gl.convert_layout(Eb, left_b)
    if DECAY >= 1:
        mbarrier.wait(xbars.index(0), p)
        acc = gl.zeros([16, K], gl.float32, layout=flat)
        for j in gl.static_range(V // 16):
            x = Ss.slice(16 * j, 16, dim=0).load(flat)
            y = Xs.slice(16 * j, 16, dim=0).load(flat)
            acc += (x * y).to(gl.float32)
        most = gl.exp2(GL) * gl.sum(gl.sum(acc, 1), 0)
    Q = warpgroup_mma_wait(0, deps=[Q])
    gl.thread_barrier()
    mbarrier.arrive(sbars.index(1), count=1)
    if DECAY >= 1:
        mbarrier.arrive(xbars.index(1), count=1)
    mbarrier.wait(kbars.index(0), p)
    Q = Q * cq[:, None]
    Q = warpgroup_mma(left, ks, Q, is_async=True)
    qf = qs.load(big).to(gl.float32)
    Q = warpgroup_mma_wait(0, deps=[Q])
    aQ = gl.sum(Q * qf, 1)
    if NORM:
        Q = Q - qf * (rq * rq * aQ * unscale)[:, None]
    if DECAY >= 1:
        # What all tokens of the chunk get, they get with the last.
        aQ = aQ + gl.where(rb == C - 1, most, 0.0)
        aQs.index(e).store(aQ)
    dos.index(a).store(Q.to(dt))
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(kbars.index(1), count=1)
    if DECAY >= 1:
        mbarrier.arrive(sums.index(e), count=1)
    tma.async_copy_shared_to_global(dqd, [row, h * K], dos.index(a))
    a, pa = onward(a, pa, 2)
    return a, pa, p ^ 1, 1


@gluon.jit
def _queries(
    vbars, sbars, xbars, kbars, ready, sums, dos, us, ss, Ss, Xs, qs, ks, Es, aQs, sc, dqd, table, tiles, programs, T,
    NT, HV, unscale,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, NORM: gl.constexpr, DECAY: gl.constexpr, VARLEN: gl.constexpr,
    TAIL: gl.constexpr, NE: gl.constexpr,
):  # fmt: skip
    a = 0
    pa = 0
    p = 0
    again = 0
    for tile in range(gl.program_id(0), tiles, programs):
        h, row, n = _chunk(table, tile, T, NT, HV, C, VARLEN)
        if TAIL:
            if n >= C:
                a, pa, p, again = _query_chunk(
                    vbars, sbars, xbars, kbars, ready, sums, dos, us, ss, Ss, Xs, qs, ks, Es, aQs, sc, dqd, tile, row,
                    h, unscale, a, pa, p, again, K, V, C, NORM, DECAY, NE,
                )  # fmt: skip
        else:
            a, pa, p, again = _query_chunk(
                vbars, sbars, xbars, kbars, ready, sums, dos, us, ss, Ss, Xs, qs, ks, Es, aQs, sc, dqd, tile, row, h,
                unscale, a, pa, p, again, K, V, C, NORM, DECAY, NE,
            )  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def _key_chunk(
    vbars, sbars, xbars, kbars, ready, sums, drs, us, ss, Ss, Xs, qs, ks, ps, Es, Fs, aQs, sc, g, A_log, dt_bias, dkd,
    dpd, dg, db, dy, tile, row, h, HV, beta_inv, a, pa, p, again,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, NORM: gl.constexpr, DECAY: gl.constexpr, BIAS: gl.constexpr,
    READ: gl.constexpr, BEFORE: gl.constexpr, NE: gl.constexpr,
):  # fmt: skip
    dt: gl.constexpr = qs.dtype
    big: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, K, 16])
    small: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C, 16])
    left_b: gl.constexpr = gl.DotOperandLayout(0, big, 2)
    wide: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    FLOOR: gl.constexpr = 1e-20
    ri = gl.arange(0, C, layout=gl.SliceLayout(1, small))
    ci = gl.arange(0, C, layout=gl.SliceLayout(0, small))
    rb = gl.arange(0, C, layout=gl.SliceLayout(1, big))
    sp = sc + tile.to(gl.int64) * (8 * C)
    if BEFORE:
        Gi = gl.load(sp + 3 * C - 1 + ri, mask=ri > 0, other=0.0)
    else:
        Gi = gl.load(sp + 3 * C + ri)
    # The factor of the read key.
    RP: gl.constexpr = 7 if READ else 5
    rpi = gl.load(sp + RP * C + ri)
    rp = gl.load(sp + RP * C + rb)
    ck = gl.load(sp + C + rb)
    rk = gl.load(sp + 5 * C + rb)
    bt = gl.load(sp + 6 * C + rb)
    Gb = gl.load(sp + 3 * C + rb)
    GL = gl.load(sp + 4 * C - 1)
    at = (row + rb).to(gl.int64) * HV + h
    ati = (row + ri).to(gl.int64) * HV + h
    if DECAY == 2:
        graw = gl.load(g + ati).to(gl.float32)
        if BIAS:
            graw += gl.load(dt_bias + h).to(gl.float32)
        rate = gl.exp(gl.load(A_log + h).to(gl.float32))
    bt = gl.where(gl.abs(bt) < FLOOR, FLOOR, bt)
    mbarrier.wait(vbars.index(a), pa)
    M = warpgroup_mma(
        drs.index(a), us.index(a), gl.zeros([C, C], gl.float32, layout=small), use_acc=False, is_async=True
    )
    mbarrier.wait(sbars.index(0), p)
    R = warpgroup_mma(drs.index(a), Ss, gl.zeros([C, K], gl.float32, layout=big), use_acc=False, is_async=True)
    # What left through the places of the chunk before has been read.
    tma.store_wait(0)
    gl.thread_barrier()
    mbarrier.arrive(vbars.index(3 - a), count=1, pred=again > 0)
    Gj, col = _columns(ss.index(a), C, small, FLOOR)
    if DECAY == 0:
        dec = gl.where(ri[:, None] > ci[None, :], -rpi[:, None] * col, 0.0)
    else:
        dec = gl.exp2(gl.where(ri[:, None] > ci[None, :], Gi[:, None] - Gj, -float("inf"))) * col * -rpi[:, None]
    M = warpgroup_mma_wait(1, deps=[M])
    Fb = (M * dec).to(dt)
    Fs.store(Fb)
    fence_async_shared()
    gl.thread_barrier()
    left = gl.convert_layout(Fb, left_b)
    mbarrier.wait(xbars.index(0), p)
    W = warpgroup_mma(
        us.index(a).permute((1, 0)), Xs, gl.zeros([C, K], gl.float32, layout=big), use_acc=False, is_async=True
    )
    R, W = warpgroup_mma_wait(0, deps=[R, W])
    mbarrier.arrive(sbars.index(1), count=1)
    mbarrier.arrive(xbars.index(1), count=1)
    mbarrier.wait(kbars.index(0), p)
    R = R * -ck[:, None]
    W = W * (rk * bt * gl.exp2(GL - Gb))[:, None]
    R = warpgroup_mma(left, ks, R, is_async=True)
    kf = ks.load(big).to(gl.float32)
    if DECAY >= 1:
        aX = gl.sum(W * kf, 1)
    if READ:
        W = warpgroup_mma(Fs.permute((1, 0)), ps, W, is_async=True)
    else:
        W = warpgroup_mma(Fs.permute((1, 0)), ks, W, is_async=True)
    e = 0
    pe = p
    if NE == 2:
        e = a
        pe = pa
    mbarrier.wait(ready.index(e), pe)
    W = warpgroup_mma(Es.index(e).permute((1, 0)), qs, W, is_async=True)
    R, W = warpgroup_mma_wait(0, deps=[R, W])
    aW = gl.sum(W * kf, 1)
    if READ:
        pf = ps.load(big).to(gl.float32)
        aR = gl.sum(R * pf, 1)
        if NORM:
            R = R - pf * (rp * rp * aR)[:, None]
            W = W - kf * (rk * rk * aW)[:, None]
        # The other group was done with u before it wrote E.
        out = us.index(a)._reinterpret(dt, [C, K], wide)
        out.store(R.to(dt))
    else:
        aR = gl.sum(R * kf, 1)
        W = W + R
        if NORM:
            W = W - kf * (rk * rk * (aR + aW))[:, None]
    drs.index(a).store(W.to(dt))
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(kbars.index(1), count=1)
    tma.async_copy_shared_to_global(dkd, [row, h * K], drs.index(a))
    if READ:
        tma.async_copy_shared_to_global(dpd, [row, h * K], out)
    gl.store(db + at, gl.where(beta_inv > 0, aW * (1.0 - bt * beta_inv), aW / bt).to(db.dtype.element_ty))
    if DECAY >= 1:
        # Each token gets what it and those after it have, and what the state's gradient gives all of them.
        own = gl.convert_layout(aR - aW, gl.SliceLayout(0, small))
        all_ = gl.convert_layout(aX, gl.SliceLayout(0, small))
        mbarrier.wait(sums.index(e), pe)
        own += aQs.index(e).load(gl.SliceLayout(0, small))
        gl.thread_barrier()
    mbarrier.arrive(ready.index(NE + e), count=1)
    if DECAY >= 1:
        dgt = gl.sum(gl.where(ci[None, :] >= ri[:, None], own[None, :], 0.0) + all_[None, :], 1)
        if BEFORE:
            dgt -= gl.convert_layout(aR, gl.SliceLayout(1, small))
        if DECAY == 2:
            dgt = dgt * -rate
            smooth = gl.where(graw > 20.0, graw, gl.log(1.0 + gl.exp(gl.minimum(graw, 20.0))))
            gl.store(dy + ati, dgt * smooth)
            dgt = dgt / (1.0 + gl.exp(-graw))
        gl.store(dg + ati, dgt.to(dg.dtype.element_ty))
    a, pa = onward(a, pa, 2)
    return a, pa, p ^ 1, 1


@gluon.jit
def _keys(
    vbars, sbars, xbars, kbars, ready, sums, drs, us, ss, Ss, Xs, qs, ks, ps, Es, Fs, aQs, sc, g, A_log, dt_bias, dkd,
    dpd, dg, db, dy, table, tiles, programs, T, NT, HV, beta_inv,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, NORM: gl.constexpr, DECAY: gl.constexpr, BIAS: gl.constexpr,
    READ: gl.constexpr, BEFORE: gl.constexpr, VARLEN: gl.constexpr, TAIL: gl.constexpr, NE: gl.constexpr,
):  # fmt: skip
    a = 0
    pa = 0
    p = 0
    again = 0
    for tile in range(gl.program_id(0), tiles, programs):
        h, row, n = _chunk(table, tile, T, NT, HV, C, VARLEN)
        if TAIL:
            if n >= C:
                a, pa, p, again = _key_chunk(
                    vbars, sbars, xbars, kbars, ready, sums, drs, us, ss, Ss, Xs, qs, ks, ps, Es, Fs, aQs, sc, g, A_log,
                    dt_bias, dkd, dpd, dg, db, dy, tile, row, h, HV, beta_inv, a, pa, p, again, K, V, C, NORM, DECAY,
                    BIAS, READ, BEFORE, NE,
                )  # fmt: skip
        else:
            a, pa, p, again = _key_chunk(
                vbars, sbars, xbars, kbars, ready, sums, drs, us, ss, Ss, Xs, qs, ks, ps, Es, Fs, aQs, sc, g, A_log,
                dt_bias, dkd, dpd, dg, db, dy, tile, row, h, HV, beta_inv, a, pa, p, again, K, V, C, NORM, DECAY,
                BIAS, READ, BEFORE, NE,
            )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "programs", "T", "NT", "H", "HV", "unscale", "beta_inv"])
def groups_grad(
    sc, qd, kd, pd, dod, drd, Ud, Sd, Xd, scd, g, A_log, dt_bias, dqd, dkd, dpd, dg, db, dy, table, tiles, programs, T,
    NT, H, HV, unscale, beta_inv,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, NORM: gl.constexpr, DECAY: gl.constexpr, BIAS: gl.constexpr,
    READ: gl.constexpr, BEFORE: gl.constexpr, VARLEN: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """Whole chunks ``program, program + programs, ...`` of ``tiles``. Arguments and flags as in `scalar_grad`; TAIL:
    some chunks may not be whole. NE: places of E and of the sums q . Q."""
    dt: gl.constexpr = qd.dtype
    NE: gl.constexpr = 1 if READ else 2
    wide: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    Ss = gl.allocate_shared_memory(dt, [V, K], wide)
    Xs = gl.allocate_shared_memory(dt, [V, K], wide)
    dos = gl.allocate_shared_memory(dt, [2, C, V], wide)
    drs = gl.allocate_shared_memory(dt, [2, C, V], wide)
    us = gl.allocate_shared_memory(dt, [2, V, C], wide)
    qs = gl.allocate_shared_memory(dt, [C, K], wide)
    ks = gl.allocate_shared_memory(dt, [C, K], wide)
    ps = ks
    if READ:
        ps = gl.allocate_shared_memory(dt, [C, K], wide)
    Es = gl.allocate_shared_memory(dt, [NE, C, C], wide)
    Fs = gl.allocate_shared_memory(dt, [C, C], wide)
    ss = gl.allocate_shared_memory(gl.float32, [2, 4, C], flat)
    aQs = gl.allocate_shared_memory(gl.float32, [NE, C], line)
    vbars = ring(2, 2)
    sbars = ring(1, 2)
    # Without a decay one group alone reads the gradients of states.
    xbars = ring(1, 2 if DECAY >= 1 else 1)
    kbars = ring(1, 2)
    ready = ring(NE, 1)
    sums = ring(NE, 1)
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (_queries, (vbars, sbars, xbars, kbars, ready, sums, dos, us, ss, Ss, Xs, qs, ks, Es, aQs, sc, dqd, table,
                        tiles, programs, T, NT, HV, unscale, K, V, C, NORM, DECAY, VARLEN, TAIL, NE)),
            (_keys, (vbars, sbars, xbars, kbars, ready, sums, drs, us, ss, Ss, Xs, qs, ks, ps, Es, Fs, aQs, sc, g,
                     A_log, dt_bias, dkd, dpd, dg, db, dy, table, tiles, programs, T, NT, HV, beta_inv, K, V, C, NORM,
                     DECAY, BIAS, READ, BEFORE, VARLEN, TAIL, NE)),
            (_copy, (vbars, sbars, xbars, kbars, dos, drs, us, ss, Ss, Xs, qs, ks, ps, dod, drd, Ud, scd, Sd, Xd, qd,
                     kd, pd, table, tiles, programs, T, NT, H, HV, K, V, C, READ, VARLEN, TAIL)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
