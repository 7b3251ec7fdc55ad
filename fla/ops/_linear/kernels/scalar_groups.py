# SPDX-License-Identifier: MIT
# mypy: ignore-errors
# ruff: noqa: SIM102  (a compile-time and a run-time condition are two statements)
"""The forward scan of scalar decays with a warp that copies and groups of warps that compute, for Hopper.

What `scalar_scan` does with one block of K, in Gluon: each group of four warps holds 64 columns of V and goes its own
pace, and a warp of its own keeps tiles on their way. Nothing in a step is waited for but its tiles: scores do not
depend on the state, and the state's update does not depend on the outputs.

REVERSE: from the last token to the first, without a gate per token.

A ragged last chunk is a step like others. Rows past its end, which may hold anything, are cleared in shared memory.
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


@gluon.jit
def _copy(
    bars, qs, ks, vs, ss, qd, kd, vd, sd, tile, row, h, H, v0, n,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, DECAY: gl.constexpr, N: gl.constexpr, NC: gl.constexpr,
    REVERSE: gl.constexpr,
):  # fmt: skip
    a = 0
    pa = 1
    for _ in range(n):
        full = bars.index(a)
        mbarrier.wait(bars.index(N + a), pa)
        mbarrier.expect(full, 2 * C * (2 * K + 64 * NC) + (16 * C if DECAY == 1 else 0))
        tma.async_copy_global_to_shared(kd, [row, h * K], full, ks.index(a))
        tma.async_copy_global_to_shared(qd, [row, h * K], full, qs.index(a))
        tma.async_copy_global_to_shared(vd, [row, h * V + v0], full, vs.index(NC * a))
        if NC == 2:
            tma.async_copy_global_to_shared(vd, [row, h * V + v0 + 64], full, vs.index(2 * a + 1))
        if DECAY == 1:
            tma.async_copy_global_to_shared(sd, [tile * 3, 0], full, ss.index(a))
        a, pa = onward(a, pa, N)
        if REVERSE:
            row -= C
            tile -= H
        else:
            row += C
            tile += H


@gluon.jit
def _compute(
    bars, qs, ks, vs, ss, ps, os, o, od, sums, gamma, h0, ht, entry, tile, row, left, h, H, v0, n, i, segments, has_h0,
    has_ht, scale,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, DECAY: gl.constexpr, MARK: gl.constexpr, VFIRST: gl.constexpr,
    TAIL: gl.constexpr, N: gl.constexpr, NC: gl.constexpr, REVERSE: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    dt: gl.constexpr = qs.dtype
    big: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, K, 16])
    small: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C, 16])
    left_s: gl.constexpr = gl.DotOperandLayout(0, small, 2)
    left_b: gl.constexpr = gl.DotOperandLayout(0, big, 2)
    v0 += 64 * W
    state = (i.to(gl.int64) * H + h) * (K * V)
    S = gl.zeros([64, K], gl.float32, layout=big)
    if has_h0 != 0:
        S = gl.load(h0 + state + places(v0, K, V, VFIRST, big)).to(gl.float32)
    if REVERSE and DECAY == 0:
        S = S / scale
    zero = gl.zeros([64, C], gl.float32, layout=small)
    token = gl.arange(0, C, layout=gl.SliceLayout(0, small))
    key = gl.arange(0, C, layout=gl.SliceLayout(1, small))
    if REVERSE:
        ahead = key[:, None] - token[None, :]
    else:
        ahead = token[None, :] - key[:, None]
    a = 0
    pa = 0
    slot = 0
    mark = 0
    per = (n + segments - 1) // segments
    if DECAY == 1:
        # The decay of a chunk is its last sum; it comes a step ahead.
        G = sums + C - 1
        last = gl.load(G + tile.to(gl.int64) * (3 * C), mask=n > 0, other=0.0)
        # So do the sums by rows of the scores.
        rows = gl.load(sums + tile.to(gl.int64) * (3 * C) + key, mask=(key >= 0) & (n > 0), other=0.0)
    if DECAY == 2:
        x = gl.load(gamma + h).to(gl.float32)
    for t in range(n):
        if MARK:
            if t == mark:
                at = entry + ((i.to(gl.int64) * segments + slot) * H + h) * (K * V)
                gl.store(at + places(v0, K, V, True, big), S)
                slot += 1
                mark += per
        if DECAY == 1:
            decay = gl.exp2(last)
            then = gl.where(t + 1 < n, tile + H, tile)
            last = gl.load(G + then.to(gl.int64) * (3 * C))
            bk = rows
            rows = gl.load(sums + then.to(gl.int64) * (3 * C) + key)
        if DECAY == 2:
            # Loaded again in each step, so that what is made of it does not stay in registers.
            x = gl.maximum(x * 1.4426950408889634, -160.0)
            if TAIL:
                bq = x * gl.minimum(token + 1, left).to(gl.float32)
                bk = x * gl.minimum(key + 1, left).to(gl.float32)
                end = x * gl.minimum(left, C)
            else:
                bq = x * (token + 1).to(gl.float32)
                bk = x * (key + 1).to(gl.float32)
                end = x * C
            decay = gl.exp2(end)
            x = gl.load(gamma + h).to(gl.float32)
        # All that is done with the state before the first product: ptxas else waits for the product first.
        Sb = gl.convert_layout(S.to(dt), left_s)
        if DECAY:
            S = S * decay
        mbarrier.wait(bars.index(a), pa)
        if TAIL:
            if left < C:
                clear_rows(ks.index(a), left, K)
                clear_rows(vs.index(NC * a + W), left, 64)
        q = qs.index(a).permute((1, 0))
        v = vs.index(NC * a + W).permute((1, 0))
        p = warpgroup_mma(ks.index(a), q, zero, use_acc=False, is_async=True)
        y = warpgroup_mma(Sb, q, zero, use_acc=False, is_async=True)
        p = warpgroup_mma_wait(1, deps=[p])
        if DECAY == 1:
            # Masked before the exponential, which may overflow where a query is before the key.
            d = ss.index(a).slice(0, 1, dim=0).load(small) - bk[:, None]
            p = p * (gl.exp2(gl.where(ahead >= 0, d, -float("inf"))) * scale)
        elif DECAY == 2:
            if REVERSE:
                d = bk[:, None] - bq[None, :]
            else:
                d = bq[None, :] - bk[:, None]
            p = p * (gl.exp2(gl.where(ahead >= 0, d, -float("inf"))) * scale)
        else:
            p = gl.where(ahead >= 0, p * scale, zero)
        ps.index(W).store(p.to(dt))
        fence_async_shared()
        gl.thread_barrier()
        if DECAY == 0:
            S = warpgroup_mma(v, ks.index(a), S, is_async=True)
        else:
            if DECAY == 1:
                after = ss.index(a).slice(2, 1, dim=0).load(small)
            elif REVERSE:
                after = (gl.exp2(bq) * scale)[None, :]
            else:
                after = gl.exp2(end - bq)[None, :]
            w = gl.convert_layout((v.load(small).to(gl.float32) * after).to(dt), left_b)
            S = warpgroup_mma(w, ks.index(a), S, is_async=True)
        y = warpgroup_mma_wait(1, deps=[y])
        if DECAY == 1:
            y = y * ss.index(a).slice(1, 1, dim=0).load(small)
        elif DECAY == 2:
            if REVERSE:
                y = y * gl.exp2(end - bq)[None, :]
            else:
                y = y * (gl.exp2(bq) * scale)[None, :]
        else:
            y = y * scale
        y = warpgroup_mma(v, ps.index(W), y, is_async=True)
        S, y = warpgroup_mma_wait(0, deps=[S, y])
        mbarrier.arrive(bars.index(N + a), count=1)
        # The last copy out of this buffer has been read, and all warps are done with the scores.
        tma.store_wait(0)
        gl.thread_barrier()
        os.index(W).permute((1, 0)).store(y.to(dt))
        if TAIL:
            if left < C:
                store_left(os.index(W), o, row, left, h, H, v0, V)
            else:
                fence_async_shared()
                gl.thread_barrier()
                tma.async_copy_shared_to_global(od, [row, h * V + v0], os.index(W))
        else:
            fence_async_shared()
            gl.thread_barrier()
            tma.async_copy_shared_to_global(od, [row, h * V + v0], os.index(W))
        a, pa = onward(a, pa, N)
        if REVERSE:
            row -= C
            left += C
            tile -= H
        else:
            row += C
            left -= C
            tile += H
    if MARK:
        for s in range(slot, segments):
            at = entry + ((i.to(gl.int64) * segments + s) * H + h) * (K * V)
            gl.store(at + places(v0, K, V, True, big), S)
    if REVERSE and DECAY == 0:
        S = S * scale
    tma.store_wait(0)
    if has_ht != 0:
        gl.store(ht + state + places(v0, K, V, VFIRST, big), S)


@gluon.jit(do_not_specialize=["T", "NT", "H", "has_h0", "has_ht", "segments"])
def linear_groups_scan(
    sums, qd, kd, vd, sd, gamma, o, od, h0, ht, entry, cu, offsets, T, NT, H, has_h0, has_ht, segments, scale,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, DECAY: gl.constexpr, MARK: gl.constexpr, VFIRST: gl.constexpr,
    VARLEN: gl.constexpr, TAIL: gl.constexpr, N: gl.constexpr, NC: gl.constexpr,
):  # fmt: skip
    """One program a block of ``64 NC`` columns of V, head and sequence; N places in the ring.

    MARK: write the states in which the ``segments`` stretches of a sequence begin to ``entry``, transposed. TAIL:
    there may be chunks that are not full. DECAY as in `scalar_scan`."""
    pid = gl.program_id(0)
    NV: gl.constexpr = V // (64 * NC)
    v0 = (pid % NV) * (64 * NC)
    h = (pid // NV) % H
    i = pid // (NV * H)
    row, length, first = sequence_of(cu, offsets, i, T, NT, VARLEN)
    tile = first * H + h
    n = (length + C - 1) // C
    dt: gl.constexpr = qd.dtype
    wide: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    qs = gl.allocate_shared_memory(dt, [N, C, K], wide)
    ks = gl.allocate_shared_memory(dt, [N, C, K], wide)
    vs = gl.allocate_shared_memory(dt, [NC * N, C, 64], wide)
    ps = gl.allocate_shared_memory(dt, [NC, C, C], wide)
    os = gl.allocate_shared_memory(dt, [NC, C, 64], wide)
    ss = qs
    if DECAY == 1:
        ss = gl.allocate_shared_memory(gl.float32, [N, 4, C], flat)
    bars = ring(N, NC)
    fence_async_shared()
    gl.thread_barrier()
    # Constants stay constants only in tuples that are written out.
    if NC == 2:
        gl.warp_specialize(
            [
                (_compute, (bars, qs, ks, vs, ss, ps, os, o, od, sums, gamma, h0, ht, entry, tile, row, length, h, H,
                            v0, n, i, segments, has_h0, has_ht, scale, K, V, C, DECAY, MARK, VFIRST, TAIL, N, NC,
                            False, 0)),
                (_compute, (bars, qs, ks, vs, ss, ps, os, o, od, sums, gamma, h0, ht, entry, tile, row, length, h, H,
                            v0, n, i, segments, has_h0, has_ht, scale, K, V, C, DECAY, MARK, VFIRST, TAIL, N, NC,
                            False, 1)),
                (_copy, (bars, qs, ks, vs, ss, qd, kd, vd, sd, tile, row, h, H, v0, n, K, V, C, DECAY, N, NC, False)),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_compute, (bars, qs, ks, vs, ss, ps, os, o, od, sums, gamma, h0, ht, entry, tile, row, length, h, H,
                            v0, n, i, segments, has_h0, has_ht, scale, K, V, C, DECAY, MARK, VFIRST, TAIL, N, NC,
                            False, 0)),
                (_copy, (bars, qs, ks, vs, ss, qd, kd, vd, sd, tile, row, h, H, v0, n, K, V, C, DECAY, N, NC, False)),
            ],
            [1],
            [40],
        )  # fmt: skip
