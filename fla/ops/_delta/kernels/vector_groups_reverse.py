# SPDX-License-Identifier: MIT
# mypy: ignore-errors
# ruff: noqa: SIM102  (a compile-time and a run-time condition are two statements)
"""`vector_scan_bwd` with a warp that copies and groups that compute; see `vector_groups`."""

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
from fla.ops._delta.kernels.groups_watch import judge, watch
from fla.ops._delta.kernels.vector_groups import clear_chunk, store_chunk


@gluon.jit
def _copy(
    bars, kds, kus, qds, tbs, tms, as_, dos, es, td, md, dod, ed, bos, first, h, H, v0, n,
    K: gl.constexpr, V: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    at = 0
    phase = 1
    size: gl.constexpr = 64 * (3 * K + 160) + 4 * K
    for s in range(n):
        t = n - 1 - s
        w = (first + t // 2) * H + h
        sub = t % 2
        tr = w * 192 + sub * 32
        full = bars.index(at)
        mbarrier.wait(bars.index(N + at), phase)
        mbarrier.expect(full, size)
        tma.async_copy_global_to_shared(dod, [bos + t * 32, h * V + v0], full, dos.index(at))
        tma.async_copy_global_to_shared(md, [tr + 64, 0], full, as_.index(at))
        tma.async_copy_global_to_shared(td, [tr + 64, 0], full, kus.index(at))
        tma.async_copy_global_to_shared(ed, [w * 2 + sub, 0], full, es.index(at))
        tma.async_copy_global_to_shared(td, [tr + 128, 0], full, qds.index(at))
        tma.async_copy_global_to_shared(md, [tr, 0], full, tbs.index(at))
        tma.async_copy_global_to_shared(md, [tr + 128, 0], full, tms.index(at))
        tma.async_copy_global_to_shared(td, [tr, 0], full, kds.index(at))
        at, phase = onward(at, phase, N)


@gluon.jit
def _compute(
    bars, kds, kus, qds, tbs, tms, as_, dos, es, Xs, ys, dvs, dv, dvd, Xd, yd, dht, dh0, bos, first, length, h, H, v0,
    n, state, has_dht, has_dh0, long,
    K: gl.constexpr, V: gl.constexpr, VFIRST: gl.constexpr, TAIL: gl.constexpr, WATCH: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    dt: gl.constexpr = kds.dtype
    big: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, K, 16])
    small: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16])
    left_s: gl.constexpr = gl.DotOperandLayout(0, small, 2)
    left_b: gl.constexpr = gl.DotOperandLayout(0, big, 2)
    X = gl.zeros([64, K], gl.float32, layout=big)
    if has_dht != 0:
        X = gl.load(dht + state + places(v0, K, V, VFIRST, big)).to(gl.float32)
    zero = gl.zeros([64, 32], gl.float32, layout=small)
    if WATCH:
        top = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, small))
    at = 0
    phase = 0
    for s in range(n):
        t = n - 1 - s
        w = (first + t // 2) * H + h
        sub = t % 2
        left = length - t * 32
        Xb = X.to(dt)
        mbarrier.wait(bars.index(at), phase)
        if TAIL:
            if left < 32:
                clear_chunk(dos.index(at), left)
        dT = dos.index(at).permute((1, 0))
        dn = warpgroup_mma(dT, as_.index(at), zero, use_acc=False, is_async=True)
        dn = warpgroup_mma(gl.convert_layout(Xb, left_s), kus.index(at).permute((1, 0)), dn, is_async=True)
        # The last step's copy out of this buffer has been read; those begun after it may be on their way.
        tma.store_wait(1 if TAIL else 2)
        gl.thread_barrier()
        Xs.store(Xb)
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(Xd, [(w * 2 + sub) * V + v0, 0], Xs)
        dn = warpgroup_mma_wait(0, deps=[dn])
        dn = gl.convert_layout(dn.to(dt), left_s)
        dr = warpgroup_mma(dn, tbs.index(at), zero, use_acc=False, is_async=True)
        y = warpgroup_mma(dn, tms.index(at), zero, use_acc=False, is_async=True)
        X = X * es.index(at).load(big)
        X = warpgroup_mma(dT, qds.index(at), X, is_async=True)
        dr, y = warpgroup_mma_wait(1, deps=[dr, y])
        X = warpgroup_mma(gl.convert_layout((-dr).to(dt), left_b), kds.index(at), X, is_async=True)
        if WATCH:
            top = watch(top, dr)
        tma.store_wait(1)
        gl.thread_barrier()
        dvs.permute((1, 0)).store(dr.to(dt))
        ys.store(y.to(dt))
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(yd, [w * V + v0, sub * 32], ys)
        store_chunk(dvs, dv, dvd, bos + t * 32, left, h, H, v0, V, TAIL)
        X = warpgroup_mma_wait(0, deps=[X])
        mbarrier.arrive(bars.index(N + at), count=1)
        at, phase = onward(at, phase, N)
    tma.store_wait(0)
    if has_dh0 != 0:
        gl.store(dh0 + state + places(v0, K, V, VFIRST, big), X)
    if WATCH:
        judge(long, top, X, 3, big)


@gluon.jit(do_not_specialize=["T", "NT", "H", "has_dht", "has_dh0"])
def vector_groups_reverse(
    dv, td, md, dod, ed, dvd, Xd, yd, dht, dh0, cu, offsets, T, NT, H, has_dht, has_dh0, long,
    K: gl.constexpr, V: gl.constexpr, VFIRST: gl.constexpr, VARLEN: gl.constexpr, TAIL: gl.constexpr,
    WATCH: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """One program with one group a block of 64 columns of V, head and sequence; writes what `vector_scan_bwd` writes.
    N: places of the ring."""
    v0, h, i, bos, length, first = block_of(cu, offsets, T, NT, H, V, 64, VARLEN)
    n = (length + 63) // 64 * 2
    if WATCH:
        # Where the form in float32 does the work nothing is read or written.
        mine = gl.load(long) == 0
        n = gl.where(mine, n, 0)
        has_dht = gl.where(mine, has_dht, 0)
        has_dh0 = gl.where(mine, has_dh0, 0)
    state = (i.to(gl.int64) * H + h) * (K * V)
    dt: gl.constexpr = td.dtype
    wide: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    kds = gl.allocate_shared_memory(dt, [N, 32, K], wide)
    kus = gl.allocate_shared_memory(dt, [N, 32, K], wide)
    qds = gl.allocate_shared_memory(dt, [N, 32, K], wide)
    dos = gl.allocate_shared_memory(dt, [N, 32, 64], wide)
    tbs = gl.allocate_shared_memory(dt, [N, 32, 32], half)
    tms = gl.allocate_shared_memory(dt, [N, 32, 32], half)
    as_ = gl.allocate_shared_memory(dt, [N, 32, 32], half)
    es = gl.allocate_shared_memory(gl.float32, [N, 1, K], flat)
    Xs = gl.allocate_shared_memory(dt, [64, K], wide)
    ys = gl.allocate_shared_memory(dt, [64, 32], half)
    dvs = gl.allocate_shared_memory(dt, [32, 64], wide)
    bars = ring(N, 1)
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (_compute, (bars, kds, kus, qds, tbs, tms, as_, dos, es, Xs, ys, dvs, dv, dvd, Xd, yd, dht, dh0, bos, first,
                        length, h, H, v0, n, state, has_dht, has_dh0, long, K, V, VFIRST, TAIL, WATCH, N)),
            (_copy, (bars, kds, kus, qds, tbs, tms, as_, dos, es, td, md, dod, ed, bos, first, h, H, v0, n, K, V, N)),
        ],
        [1],
        [40],
    )  # fmt: skip
