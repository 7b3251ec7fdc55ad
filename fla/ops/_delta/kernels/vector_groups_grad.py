# SPDX-License-Identifier: MIT
# mypy: ignore-errors
# ruff: noqa: SIM102  (a compile-time and a run-time condition are two statements)
"""`vector_grad` for ready gates of 16 bits, with a warp that copies and two groups that compute, for Hopper.

Chunks do not depend on each other: a program goes over every so many of them, 32 tokens of a head at a time. Each group
of four warps has 64 channels, and a warp of its own keeps the tiles of the next chunks on their way, so that memory is
never waited for while there is something to compute. States and their gradients, half of all bytes, are done with
before anything else of a chunk and have a ring of their own.

All wide tiles are `[channels, tokens]`, as in `vector_grad`, whose order of sums this kernel keeps.
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
from fla.ops._delta.kernels.vector_groups import clear_chunk, store_chunk


@gluon.jit
def ex2(x):
    """`vector_math.ex2`"""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def rcp(x):
    """`vector_math.rcp`"""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def narrow(x, dt: gl.constexpr):
    """`vector_math.narrow`"""
    if dt == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return x.to(dt)


@gluon.jit
def unit_at(table, u, T, NT, H, VARLEN: gl.constexpr, ROWS: gl.constexpr):
    """Tile and head of unit ``u``, its first row and how many tokens it has, which may be none."""
    w = u // 2
    h = w % H
    it = w // H
    two = u % 2 * 32
    n = 32
    if VARLEN:
        row = gl.load(table + it * 4) + two
        n = gl.load(table + it * 4 + 1) - two
    elif ROWS:
        row = it // NT * T + it % NT * 64 + two
        n = T - it % NT * 64 - two
    else:
        row = it * 64 + two
    return w, h, row, n


@gluon.jit
def _copy_unit(
    u, w, h, row, m, pm, a, pa, sbars, bars, ss, ds, ns, ys, scs, qs, ks, gs, Sd, Xd, dod, yd, nd, scd, qd, kd, gd,
    NS: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    c = h * 128
    full = bars.index(a)
    mbarrier.wait(bars.index(N + a), pa)
    mbarrier.expect(full, 64 * (6 * 128 + 64))
    for p in gl.static_range(2):
        tma.async_copy_global_to_shared(gd, [row, c + 64 * p], full, gs.index(2 * a + p))
        tma.async_copy_global_to_shared(dod, [row, c + 64 * p], full, ds.index(2 * a + p))
    tma.async_copy_global_to_shared(yd, [w * 128, u % 2 * 32], full, ys.index(a))
    tma.async_copy_global_to_shared(scd, [u * 64, 0], full, scs.index(a))
    tma.async_copy_global_to_shared(nd, [w * 128, u % 2 * 32], full, ns.index(a))
    for p in gl.static_range(2):
        tma.async_copy_global_to_shared(kd, [row, c + 64 * p], full, ks.index(2 * a + p))
        tma.async_copy_global_to_shared(qd, [row, c + 64 * p], full, qs.index(2 * a + p))
    a, pa = onward(a, pa, N)
    full = sbars.index(m)
    mbarrier.wait(sbars.index(NS + m), pm)
    mbarrier.expect(full, 2 * 128 * 128)
    for p in gl.static_range(2):
        tma.async_copy_global_to_shared(Sd, [u * 128, 64 * p], full, ss.index(2 * m + p))
    m, pm = onward(m, pm, NS)
    full = sbars.index(m)
    mbarrier.wait(sbars.index(NS + m), pm)
    mbarrier.expect(full, 2 * 128 * 128)
    for p in gl.static_range(2):
        tma.async_copy_global_to_shared(Xd, [u * 128, 64 * p], full, ss.index(2 * m + p))
    m, pm = onward(m, pm, NS)
    return m, pm, a, pa


@gluon.jit
def _copy(
    sbars, bars, ss, ds, ns, ys, scs, qs, ks, gs, Sd, Xd, dod, yd, nd, scd, qd, kd, gd, table, T, NT, H, count,
    VARLEN: gl.constexpr, ROWS: gl.constexpr, NS: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    m = 0
    pm = 1
    a = 0
    pa = 1
    u = gl.program_id(0)
    for _ in range(count):
        w, h, row, n = unit_at(table, u, T, NT, H, VARLEN, ROWS)
        if ROWS:
            if n > 0:
                m, pm, a, pa = _copy_unit(
                    u, w, h, row, m, pm, a, pa, sbars, bars, ss, ds, ns, ys, scs, qs, ks, gs, Sd, Xd, dod, yd, nd, scd,
                    qd, kd, gd, NS, N,
                )  # fmt: skip
        else:
            m, pm, a, pa = _copy_unit(
                u, w, h, row, m, pm, a, pa, sbars, bars, ss, ds, ns, ys, scs, qs, ks, gs, Sd, Xd, dod, yd, nd, scd, qd,
                kd, gd, NS, N,
            )  # fmt: skip
        u += gl.num_programs(0)


@gluon.jit
def _unit(
    u, w, h, row, n, t, m, pm, a, pa, sbars, bars, ss, ds, ns, ys, scs, qs, ks, gs, tri, beta, norms, vecs, dq, dqd, dk,
    dkd, dg, dgd, db, H, rows, scale,
    BETA: gl.constexpr, NORM: gl.constexpr, FREE: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr,
    NS: gl.constexpr, N: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """The part of group ``W`` in unit ``u``, the ``t``-th of the program; ``n``: its tokens."""
    dt: gl.constexpr = qs.dtype
    small: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16])
    square: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, small, 2)
    wide: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    zero = gl.zeros([64, 32], gl.float32, layout=small)
    zeros = gl.zeros([64, 64], gl.float32, layout=square)
    j = gl.arange(0, 32, layout=gl.SliceLayout(0, small))
    diag = (
        gl.arange(0, 64, layout=gl.SliceLayout(1, square))[:, None]
        == gl.arange(0, 64, layout=gl.SliceLayout(0, square))[None, :]
    )
    # The same memory in tiles as products take them.
    st = ss._reinterpret(dt, [4 * NS, 64, 64], wide)
    nt = ns._reinterpret(dt, [2 * N, 64, 32], half)
    yt = ys._reinterpret(dt, [2 * N, 64, 32], half)
    sct = scs._reinterpret(dt, [2 * N, 32, 32], half)
    at = (row + j).to(gl.int64) * H + h
    rq = gl.full([32], 1.0, gl.float32, layout=gl.SliceLayout(0, small))
    rk = rq
    if NORM:
        np = norms + w.to(gl.int64) * 128 + u % 2 * 32 + j
        rq = gl.load(np)
        rk = gl.load(np + 64)
    if ROWS:
        bv = gl.load(beta + at, mask=j < n, other=0.0).to(gl.float32)
    else:
        bv = gl.load(beta + at).to(gl.float32)
    if BETA > 0:
        bv = BETA * rcp(1.0 + ex2(bv * -1.4426950408889634))
    mbarrier.wait(bars.index(a), pa)
    if ROWS:
        # What lies past the end may be anything. States' sides are 0 there.
        if n < 32:
            clear_chunk(gs.index(2 * a + W), n)
            clear_chunk(ks.index(2 * a + W), n)
            clear_chunk(qs.index(2 * a + W), n)
            clear_chunk(ds.index(2 * a), n)
            clear_chunk(ds.index(2 * a + 1), n)
    # A promise that is broken stays finite, see `vector_math.raw_decay`.
    floor: gl.constexpr = -178.0 if FREE else -5.03125
    x = gs.index(2 * a + W).permute((1, 0)).load(small).to(gl.float32)
    x = gl.where(x < floor, floor, x)
    G = warpgroup_mma(gl.convert_layout(narrow(x, dt), left), tri.permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(sbars.index(m), pm)
    S0 = st.index(4 * m + 2 * W)
    S1 = st.index(4 * m + 2 * W + 1)
    ms = m
    m, pm = onward(m, pm, NS)
    p = warpgroup_mma(S0.permute((1, 0)), ds.index(2 * a).permute((1, 0)), zero, use_acc=False, is_async=True)
    p = warpgroup_mma(S1.permute((1, 0)), ds.index(2 * a + 1).permute((1, 0)), p, is_async=True)
    z = warpgroup_mma(S0.permute((1, 0)), yt.index(2 * a), zero, use_acc=False, is_async=True)
    z = warpgroup_mma(S1.permute((1, 0)), yt.index(2 * a + 1), z, is_async=True)
    mbarrier.wait(sbars.index(m), pm)
    X0 = st.index(4 * m + 2 * W)
    X1 = st.index(4 * m + 2 * W + 1)
    VX = warpgroup_mma(X0.permute((1, 0)), nt.index(2 * a), zero, use_acc=False, is_async=True)
    VX = warpgroup_mma(X1.permute((1, 0)), nt.index(2 * a + 1), VX, is_async=True)
    SX = warpgroup_mma(S0.permute((1, 0)), X0, zeros, use_acc=False, is_async=True)
    SX = warpgroup_mma(S1.permute((1, 0)), X1, SX, is_async=True)
    # What the last unit left in its place has been read: the place is free.
    if t > 0:
        tma.store_wait(0)
        gl.thread_barrier()
        mbarrier.arrive(bars.index(N + gl.where(a == 0, N - 1, a - 1)), count=1)
    kx = ks.index(2 * a + W).permute((1, 0)).load(small)
    qx = qs.index(2 * a + W).permute((1, 0)).load(small)
    G = warpgroup_mma_wait(8, deps=[G])
    unit = gl.load(vecs + u.to(gl.int64) * 160 + 128)
    A = sct.index(2 * a)
    F = sct.index(2 * a + 1)
    back = 1.0 / unit
    G = G * 1.4426950408889634
    rs = rq * scale
    # All decays of a chunk are that of the scores, 116 bits above, times a factor per channel.
    E = ex2(G + 116.0)
    kn = kx.to(gl.float32) * rk[None, :]
    kc = narrow(kn * ex2((G + 116.0) * -1.0), dt)
    kr = narrow(kn * (E * bv[None, :]), dt)
    qr = narrow(qx.to(gl.float32) * (E * rs[None, :]), dt)
    last = gl.sum(gl.where((j == 31)[None, :], G, zero), 1)
    p, z, VX, SX = warpgroup_mma_wait(0, deps=[p, z, VX, SX])
    sx = gl.convert_layout(gl.sum(gl.where(diag, SX, zeros), 1), gl.SliceLayout(1, small))
    gl.thread_barrier()
    mbarrier.arrive(sbars.index(NS + ms), count=1)
    mbarrier.arrive(sbars.index(NS + m), count=1)
    m, pm = onward(m, pm, NS)
    p = p * (back * 2.0**-116)
    z = z * (back * -(2.0**-116))
    kl = gl.convert_layout(kc, left)
    p = warpgroup_mma(kl, A.permute((1, 0)), p, is_async=True)
    z = warpgroup_mma(kl, F.permute((1, 0)), z, is_async=True)
    f = warpgroup_mma(gl.convert_layout(qr, left), A, zero, use_acc=False, is_async=True)
    f = warpgroup_mma(gl.convert_layout(kr, left), F, f, is_async=True)
    vp = vecs + u.to(gl.int64) * 160 + j
    if NORM:
        nq = gl.load(vp)
        nk = gl.load(vp + 32)
    if W == 0:
        dbv = gl.load(vp + 64)
    else:
        dbv = gl.zeros([32], gl.float32, layout=gl.SliceLayout(0, small))
    sx = sx * (back * ex2(last))
    Ei = rcp(E)
    VX = (VX * back) * (Ei * ex2(last + 116.0)[:, None])
    hp = VX * (ks.index(2 * a + W).permute((1, 0)).load(small).to(gl.float32) * rk[None, :])
    sx += gl.sum(hp, 1)
    p, z = warpgroup_mma_wait(2, deps=[p, z])
    hp = qr.to(gl.float32) * p + kr.to(gl.float32) * z - hp
    p = p * (E * (rs * unit)[None, :])
    z = z * E
    f = warpgroup_mma_wait(0, deps=[f])
    hp -= kc.to(gl.float32) * f
    f = VX + Ei * f
    hi = narrow(hp, dt)
    lo = narrow(hp - hi.to(gl.float32), dt)
    xg = warpgroup_mma(gl.convert_layout(hi, left), tri, zero, use_acc=False, is_async=True)
    xg = warpgroup_mma(gl.convert_layout(lo, left), tri, xg, is_async=True)
    # Brought in once more: kept, they would take registers all the while.
    kf = ks.index(2 * a + W).permute((1, 0)).load(small).to(gl.float32)
    qf = qs.index(2 * a + W).permute((1, 0)).load(small).to(gl.float32)
    dbv += gl.sum(kf * z, 0) * (rk * unit)
    if BETA > 0:
        dbv = dbv * bv * (1.0 - bv / BETA)
    f = (z * bv[None, :] + f) * (rk * unit)[None, :]
    R: gl.constexpr = PARTS // 2
    dp = db + W * R * rows * H + at
    if ROWS:
        gl.store(dp, dbv, mask=j < n)
        for i in gl.static_range(1, R):
            gl.store(dp + i * rows * H, gl.zeros_like(dbv), mask=j < n)
    else:
        gl.store(dp, dbv)
        for i in gl.static_range(1, R):
            gl.store(dp + i * rows * H, gl.zeros_like(dbv))
    if NORM:
        p -= qf * nq[None, :]
        f -= kf * nk[None, :]
    # All warps have their part of what is overwritten.
    gl.thread_barrier()
    qs.index(2 * a + W).permute((1, 0)).store(narrow(p, dt))
    ks.index(2 * a + W).permute((1, 0)).store(narrow(f, dt))
    xg = warpgroup_mma_wait(0, deps=[xg])
    xg = (sx[:, None] + xg) * unit
    gs.index(2 * a + W).permute((1, 0)).store(narrow(xg, dt))
    fence_async_shared()
    gl.thread_barrier()
    store_chunk(qs.index(2 * a + W), dq, dqd, row, n, h, H, 64 * W, 128, ROWS)
    store_chunk(ks.index(2 * a + W), dk, dkd, row, n, h, H, 64 * W, 128, ROWS)
    store_chunk(gs.index(2 * a + W), dg, dgd, row, n, h, H, 64 * W, 128, ROWS)
    a, pa = onward(a, pa, N)
    return m, pm, a, pa, t + 1


@gluon.jit
def _compute(
    sbars, bars, ss, ds, ns, ys, scs, qs, ks, gs, tri, beta, norms, vecs, dq, dqd, dk, dkd, dg, dgd, db, table, T, NT,
    H, count, rows, scale,
    BETA: gl.constexpr, NORM: gl.constexpr, FREE: gl.constexpr, VARLEN: gl.constexpr, ROWS: gl.constexpr,
    PARTS: gl.constexpr, NS: gl.constexpr, N: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    m = 0
    pm = 0
    a = 0
    pa = 0
    t = 0
    u = gl.program_id(0)
    for _ in range(count):
        w, h, row, n = unit_at(table, u, T, NT, H, VARLEN, ROWS)
        if ROWS:
            if n > 0:
                m, pm, a, pa, t = _unit(
                    u, w, h, row, n, t, m, pm, a, pa, sbars, bars, ss, ds, ns, ys, scs, qs, ks, gs, tri, beta, norms,
                    vecs, dq, dqd, dk, dkd, dg, dgd, db, H, rows, scale, BETA, NORM, FREE, ROWS, PARTS, NS, N, W,
                )  # fmt: skip
        else:
            m, pm, a, pa, t = _unit(
                u, w, h, row, n, t, m, pm, a, pa, sbars, bars, ss, ds, ns, ys, scs, qs, ks, gs, tri, beta, norms, vecs,
                dq, dqd, dk, dkd, dg, dgd, db, H, rows, scale, BETA, NORM, FREE, ROWS, PARTS, NS, N, W,
            )  # fmt: skip
        u += gl.num_programs(0)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["T", "NT", "H", "units", "rows"])
def vector_groups_grad(
    beta, Sd, Xd, dod, yd, nd, scd, qd, kd, gd, trid, norms, vecs, dq, dqd, dk, dkd, dg, dgd, db, table, T, NT, H,
    units, rows, scale,
    BETA: gl.constexpr, NORM: gl.constexpr, FREE: gl.constexpr, VARLEN: gl.constexpr, ROWS: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """As many programs as there are multiprocessors, for ``units`` chunks and heads, ``rows`` rows of the inputs, 128
    channels and 128 columns of V; after `vector_scores`."""
    dt: gl.constexpr = qd.dtype
    # Places for the tiles of a chunk, and for states and their gradients, which take turns.
    N: gl.constexpr = 2
    NS: gl.constexpr = 3
    count = (units - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)
    wide: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    ss = gl.allocate_shared_memory(dt, [2 * NS, 128, 64], wide)
    ds = gl.allocate_shared_memory(dt, [2 * N, 32, 64], wide)
    qs = gl.allocate_shared_memory(dt, [2 * N, 32, 64], wide)
    ks = gl.allocate_shared_memory(dt, [2 * N, 32, 64], wide)
    gs = gl.allocate_shared_memory(dt, [2 * N, 32, 64], wide)
    ns = gl.allocate_shared_memory(dt, [N, 128, 32], half)
    ys = gl.allocate_shared_memory(dt, [N, 128, 32], half)
    scs = gl.allocate_shared_memory(dt, [N, 64, 32], half)
    tris = gl.allocate_shared_memory(dt, [1, 32, 32], half)
    sbars = ring(NS, 2)
    bars = ring(N, 2)
    once = ring(1, 1)
    fence_async_shared()
    gl.thread_barrier()
    # The 0/1 matrix of sums over tokens
    mbarrier.expect(once.index(0), 2048)
    tma.async_copy_global_to_shared(trid, [0, 0], once.index(0), tris.index(0))
    mbarrier.wait(once.index(0), 0)
    tri = tris.index(0)
    # Constants stay constants only in tuples that are written out.
    gl.warp_specialize(
        [
            (_compute, (sbars, bars, ss, ds, ns, ys, scs, qs, ks, gs, tri, beta, norms, vecs, dq, dqd, dk, dkd, dg, dgd,
                        db, table, T, NT, H, count, rows, scale, BETA, NORM, FREE, VARLEN, ROWS, PARTS, NS, N, 0)),
            (_compute, (sbars, bars, ss, ds, ns, ys, scs, qs, ks, gs, tri, beta, norms, vecs, dq, dqd, dk, dkd, dg, dgd,
                        db, table, T, NT, H, count, rows, scale, BETA, NORM, FREE, VARLEN, ROWS, PARTS, NS, N, 1)),
            (_copy, (sbars, bars, ss, ds, ns, ys, scs, qs, ks, gs, Sd, Xd, dod, yd, nd, scd, qd, kd, gd, table, T, NT,
                     H, count, VARLEN, ROWS, NS, N)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
