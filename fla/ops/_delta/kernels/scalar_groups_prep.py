# SPDX-License-Identifier: MIT
# mypy: ignore-errors
"""`scalar_prep` for Hopper in programs that go from chunk to chunk, for keys that are normalised here.

The tiles of the next chunk come while this one's inverse is made, which needs none of them. Products are issued
together, and rows of the diagonal blocks go to where they are needed by one shuffle.
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

LOG2E = gl.constexpr(1.4426950408889634)
NORM_EPS = gl.constexpr(1e-6)
MIN_LOG_DECAY = gl.constexpr(-104.0)


@gluon.jit
def _place(table, tile, tiles, T, NT, HV, C: gl.constexpr, VARLEN: gl.constexpr):
    """Head, first row and rows of a chunk; no rows past the last one."""
    h = tile % HV
    it = tile // HV
    if VARLEN:
        row = gl.load(table + it * 4, mask=tile < tiles, other=0)
        n = gl.load(table + it * 4 + 1, mask=tile < tiles, other=0)
    else:
        t0 = (it % NT) * C
        row = (it // NT) * T + t0
        n = gl.where(tile < tiles, gl.minimum(T - t0, C), 0)
    return h, row, n


@gluon.jit
def _fetch(bar, qs, ks, ps, qd, kd, pd, row, hk, n, K: gl.constexpr, C: gl.constexpr, READ: gl.constexpr):
    mbarrier.expect(bar, 2 * C * K * (3 if READ else 2), pred=n > 0)
    tma.async_copy_global_to_shared(kd, [row, hk * K], bar, ks, pred=n > 0)
    if READ:
        tma.async_copy_global_to_shared(pd, [row, hk * K], bar, ps, pred=n > 0)
    tma.async_copy_global_to_shared(qd, [row, hk * K], bar, qs, pred=n > 0)


@gluon.jit
def _norm(x, eye, ok):
    return gl.where(ok, gl.rsqrt(gl.sum(gl.where(eye, x, 0.0), 1) + NORM_EPS), 0.0)


@gluon.jit
def _broadcast_rows(x, lane):
    """Each element from the row of its block of 8 that ``lane`` holds."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, -1;", "=r,r,r", [x, lane], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _merge(Y, Ls, Ys, none, C: gl.constexpr, HALF: gl.constexpr, small: gl.constexpr):
    """From the inverses of blocks of HALF in ``Y`` those of blocks twice as wide."""
    left: gl.constexpr = gl.DotOperandLayout(0, small, 2)
    r = gl.arange(0, C, layout=gl.SliceLayout(1, small))[:, None] + none
    c = gl.arange(0, C, layout=gl.SliceLayout(0, small))[None, :]
    new = (r // (2 * HALF) == c // (2 * HALF)) & (r // HALF > c // HALF)
    Yh = Y.to(gl.float16)
    # What was copied out of this buffer, and products with it, are done.
    tma.store_wait(0)
    gl.thread_barrier()
    Ys.store(Yh)
    fence_async_shared()
    gl.thread_barrier()
    nothing = gl.zeros([C, C], gl.float32, layout=small)
    P = warpgroup_mma(gl.convert_layout(Yh, left), Ls, nothing, use_acc=False, is_async=True)
    P = warpgroup_mma_wait(0, deps=[P])
    # Rows of blocks are mixed within a block only: the product may be cut in place of L.
    P = gl.convert_layout(gl.where(new, -P, 0.0).to(gl.float16), left)
    Y = warpgroup_mma(P, Ys, Y, is_async=True)
    return warpgroup_mma_wait(0, deps=[Y])


@gluon.jit
def _diagonal(L, none, C: gl.constexpr, apart: gl.constexpr):
    """The blocks of 8 on the diagonal, [C, 8]."""
    r = gl.arange(0, C, layout=gl.SliceLayout(1, gl.SliceLayout(2, apart))) + none
    n = gl.arange(0, C // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, apart)))
    own = (r[:, None] // 8 == n[None, :])[:, :, None]
    return gl.sum(gl.where(own, gl.convert_layout(L.reshape([C, C // 8, 8]), apart), 0.0), 1)


@gluon.jit
def _inverse(D, Ls, Ys, none, C: gl.constexpr, small: gl.constexpr, apart: gl.constexpr):
    """Inverse of ``I + L`` as in `tri_inv`, of L in ``Ls`` and its diagonal blocks."""
    block: gl.constexpr = gl.SliceLayout(1, apart)
    r2 = gl.arange(0, C, layout=gl.SliceLayout(1, block)) + none
    c2 = gl.arange(0, 8, layout=gl.SliceLayout(0, block))
    X = gl.where((r2 % 8)[:, None] == c2[None, :], 1.0, 0.0)
    lane = (c2 // 2)[None, :] + gl.zeros_like(r2)[:, None]
    for s in gl.static_range(7):
        col = gl.sum(gl.where((c2 == s)[None, :], D, 0.0), 1)
        X = X - col[:, None] * _broadcast_rows(X, lane + 4 * s)
    r3 = gl.arange(0, C, layout=gl.SliceLayout(1, gl.SliceLayout(2, apart))) + none
    n3 = gl.arange(0, C // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, apart)))
    Y = gl.where((r3[:, None] // 8 == n3[None, :])[:, :, None], X[:, None, :], 0.0)
    Y = gl.convert_layout(Y.reshape([C, C]), small)
    Y = _merge(Y, Ls, Ys, none, C, 8, small)
    Y = _merge(Y, Ls, Ys, none, C, 16, small)
    return _merge(Y, Ls, Ys, none, C, 32, small)


@gluon.jit(do_not_specialize=["tiles", "programs", "T", "NT", "H", "HV", "save"])
def groups_prep(
    g, qd, kd, pd, beta, A_log, dt_bias, Td, Ad, sc, table, tiles, programs, T, NT, H, HV, scale, beta_scale, save,
    K: gl.constexpr, C: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr, SIGMOID: gl.constexpr,
    READ: gl.constexpr, BEFORE: gl.constexpr, VARLEN: gl.constexpr,
):  # fmt: skip
    """Chunks ``program, program + programs, ...`` of ``tiles``. Arguments and flags as in `scalar_prep`."""
    dt: gl.constexpr = kd.dtype
    wide: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    small: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C, 16])
    # The layout of products, [C, C], with blocks of 8 columns apart.
    apart: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [8, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        lane_bases=[[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]], block_bases=[], shape=[C, C // 8, 8],
    )  # fmt: skip
    rows: gl.constexpr = gl.SliceLayout(1, small)
    cols: gl.constexpr = gl.SliceLayout(0, small)
    ks = gl.allocate_shared_memory(dt, [C, K], wide)
    qs = gl.allocate_shared_memory(dt, [C, K], wide)
    ps = ks
    if READ:
        ps = gl.allocate_shared_memory(dt, [C, K], wide)
    Ls = gl.allocate_shared_memory(gl.float16, [C, C], wide)
    Ys = gl.allocate_shared_memory(gl.float16, [C, C], wide)
    As = Ys._reinterpret(dt, [C, C], wide)
    Ts = Ls._reinterpret(dt, [C, C], wide)
    norms = gl.allocate_shared_memory(gl.float32, [2, C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bar = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bar.index(0), count=1)
    fence_async_shared()
    gl.thread_barrier()
    token = gl.arange(0, C, layout=rows)
    cc = gl.arange(0, C, layout=cols)
    nothing = gl.zeros([C, C], gl.float32, layout=small)
    tile = gl.program_id(0)
    h, row, n = _place(table, tile, tiles, T, NT, HV, C, VARLEN)
    _fetch(bar.index(0), qs, ks, ps, qd, kd, pd, row, h // (HV // H), n, K, C, READ)
    at = (row + token).to(gl.int64) * HV + h
    bt = gl.load(beta + at, mask=token < n, other=0.0).to(gl.float32)
    gt = bt
    if GATE >= 1:
        gt = gl.load(g + at, mask=token < n, other=0.0).to(gl.float32)
    phase = 0
    for this in range(gl.program_id(0), tiles, programs):
        # 0, which the compiler does not know: masks that do not change else wait in registers for their turn.
        none = n >> 31
        rr = token + none
        low = rr[:, None] > cc[None, :]
        eye = rr[:, None] == cc[None, :]
        ok = rr < n
        if SIGMOID:
            bt = gl.where(ok, beta_scale / (1.0 + gl.exp(-bt)), 0.0)
        if GATE == 0:
            G = gl.zeros([C], gl.float32, layout=rows)
            Gr = G
            Gj = gl.zeros([C], gl.float32, layout=cols)
        else:
            if GATE == 2:
                if BIAS:
                    gt += gl.load(dt_bias + h).to(gl.float32)
                smooth = gl.where(gt > 20.0, gt, gl.log(1.0 + gl.exp(gl.minimum(gt, 20.0))))
                gt = -gl.exp(gl.load(A_log + h).to(gl.float32)) * smooth
            gt = gl.where(ok, gl.maximum(gt, MIN_LOG_DECAY), 0.0) * LOG2E
            G = gl.sum(gl.where(cc[None, :] <= rr[:, None], gl.convert_layout(gt, cols)[None, :], 0.0), 1)
            Gj = gl.convert_layout(G, cols)
            Gr = G
            if BEFORE:
                Gr = G - gt
        GL = gl.sum(gl.where(rr == C - 1, G, 0.0), 0)
        if n > 0:
            mbarrier.wait(bar.index(0), phase)
            phase ^= 1
        KK = warpgroup_mma(ks, ks.permute((1, 0)), nothing, use_acc=False, is_async=True)
        QQ = warpgroup_mma(qs, qs.permute((1, 0)), nothing, use_acc=False, is_async=True)
        KK = warpgroup_mma_wait(1, deps=[KK])
        rk = _norm(KK, eye, ok)
        col = rk * bt
        rp = rk
        if READ:
            KK = warpgroup_mma(ps, ks.permute((1, 0)), nothing, use_acc=False, is_async=True)
            QQ = warpgroup_mma_wait(1, deps=[QQ])
        else:
            QQ = warpgroup_mma_wait(0, deps=[QQ])
        # Norms go through shared memory, so that the products they come from do not stay in registers.
        norms.index(0).store(_norm(QQ, eye, ok) * scale)
        if READ:
            QQ = warpgroup_mma(ps, ps.permute((1, 0)), nothing, use_acc=False, is_async=True)
            KK, QQ = warpgroup_mma_wait(0, deps=[KK, QQ])
            norms.index(1).store(_norm(QQ, eye, ok))
        cj = gl.convert_layout(col, cols)[None, :]
        if READ:
            rp = norms.index(1).load(rows)
        # With BEFORE the decay from a token to the state that another reads.
        dec = gl.exp2(gl.where(low, Gr[:, None] - Gj[None, :], -float("inf"))) * cj
        A = warpgroup_mma(qs, ks.permute((1, 0)), nothing, use_acc=False, is_async=True)
        # Selected, not multiplied away: rows past the end may hold anything.
        L = gl.where(low & ok[:, None], KK * dec * rp[:, None], 0.0)
        D = _diagonal(L, none, C, apart)
        L = L.to(gl.float16)
        A = warpgroup_mma_wait(0, deps=[A])
        # All warps are done with the tiles, and what left through the other buffers has been read.
        tma.store_wait(0)
        gl.thread_barrier()
        after = this + programs
        h2, row2, n2 = _place(table, after, tiles, T, NT, HV, C, VARLEN)
        _fetch(bar.index(0), qs, ks, ps, qd, kd, pd, row2, h2 // (HV // H), n2, K, C, READ)
        rq = norms.index(0).load(rows)
        if BEFORE:
            dec *= gl.exp2(G - Gr)[:, None]
        A = gl.where((low | eye) & ok[:, None], A * gl.where(eye, cj, dec) * rq[:, None], 0.0)
        Ls.store(L)
        As.store(A.to(dt))
        fence_async_shared()
        gl.thread_barrier()
        if n > 0:
            tma.async_copy_shared_to_global(Ad, [this * C, 0], As)
        eG = gl.exp2(G)
        ck = rp * eG
        if BEFORE:
            ck = rp * gl.exp2(Gr)
        sp = sc + this.to(gl.int64) * (8 * C) + rr
        used = (rr < C) & (n > 0)
        more = used & (save != 0)
        gl.store(sp, rq * eG, mask=used)
        gl.store(sp + C, ck, mask=used)
        gl.store(sp + 2 * C, col * gl.exp2(GL - G), mask=used)
        gl.store(sp + 3 * C, G, mask=used)
        gl.store(sp + 4 * C, rq, mask=more)
        gl.store(sp + 5 * C, rk, mask=more)
        gl.store(sp + 6 * C, bt, mask=more)
        gl.store(sp + 7 * C, rp, mask=more)
        at = (row2 + rr).to(gl.int64) * HV + h2
        bt = gl.load(beta + at, mask=rr < n2, other=0.0).to(gl.float32)
        gt = bt
        if GATE >= 1:
            gt = gl.load(g + at, mask=rr < n2, other=0.0).to(gl.float32)
        Y = _inverse(D, Ls, Ys, none, C, small, apart)
        gl.thread_barrier()
        Ts.store(Y.to(dt))
        fence_async_shared()
        gl.thread_barrier()
        if n > 0:
            tma.async_copy_shared_to_global(Td, [this * C, 0], Ts)
        h = h2
        row = row2
        n = n2
    tma.store_wait(0)
