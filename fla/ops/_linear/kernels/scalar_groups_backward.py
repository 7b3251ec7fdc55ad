# SPDX-License-Identifier: MIT
# mypy: ignore-errors
"""`scalar_thrice` with a warp that copies and groups that compute; see `scalar_groups`."""

from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from fla.ops._common.gluon_language import gl
from fla.ops._common.groups_kernels import ring, sequence_of
from fla.ops._linear.kernels.scalar_groups import _compute, _copy


@gluon.jit(do_not_specialize=["T", "NT", "H", "N", "has_h0", "has_dht", "has_dh0", "stretches"])
def linear_groups_thrice(
    k, qd, kd, vd, dod, qb, kb, dob, gamma, dq, dqd, dk, dkd, dv, dvd, h0, dht, dh0, entry, cu, offsets, T, NT, H, N,
    has_h0, has_dht, has_dh0, stretches, scale,
    K: gl.constexpr, C: gl.constexpr, DECAY: gl.constexpr, SPLIT: gl.constexpr, VFIRST: gl.constexpr,
    VARLEN: gl.constexpr, TAIL: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Gradients of q, k, v and the initial state where decays have none, for V = K: two groups a program.

    SPLIT: dq is made in ``stretches``, whose first states are in ``entry``, transposed. P: places of the ring.
    """
    KFIRST: gl.constexpr = not VFIRST
    pid = gl.program_id(0)
    px = H * N
    r = pid % px
    h = r % H
    i = r // H
    row, length, first = sequence_of(cu, offsets, i, T, NT, VARLEN)
    n = (length + C - 1) // C
    dt: gl.constexpr = qd.dtype
    wide: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    qs = gl.allocate_shared_memory(dt, [P, C, K], wide)
    ks = gl.allocate_shared_memory(dt, [P, C, K], wide)
    vs = gl.allocate_shared_memory(dt, [2 * P, C, 64], wide)
    ps = gl.allocate_shared_memory(dt, [2, C, C], wide)
    os = gl.allocate_shared_memory(dt, [2, C, 64], wide)
    bars = ring(P, 2)
    fence_async_shared()
    gl.thread_barrier()
    tile = (first + n - 1) * H + h
    last = row + (n - 1) * C
    left = length - (n - 1) * C
    # Constants stay constants only in tuples that are written out.
    if pid < px:
        gl.warp_specialize(
            [
                (_compute, (bars, qs, ks, vs, qs, ps, os, dk, dkd, k, gamma, dht, k, k, tile, last, left, h, H, 0, n,
                             i, 1, has_dht, 0, scale, K, K, C, DECAY, False, KFIRST, TAIL, P, 2, True, 0)),
                (_compute, (bars, qs, ks, vs, qs, ps, os, dk, dkd, k, gamma, dht, k, k, tile, last, left, h, H, 0, n,
                             i, 1, has_dht, 0, scale, K, K, C, DECAY, False, KFIRST, TAIL, P, 2, True, 1)),
                (_copy, (bars, qs, ks, vs, qs, vd, dod, qb, vd, tile, last, h, H, 0, n, K, K, C, DECAY, P, 2, True)),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
    elif pid < 2 * px:
        gl.warp_specialize(
            [
                (_compute, (bars, qs, ks, vs, qs, ps, os, dv, dvd, k, gamma, dht, dh0, k, tile, last, left, h, H, 0, n,
                             i, 1, has_dht, has_dh0, scale, K, K, C, DECAY, False, VFIRST, TAIL, P, 2, True, 0)),
                (_compute, (bars, qs, ks, vs, qs, ps, os, dv, dvd, k, gamma, dht, dh0, k, tile, last, left, h, H, 0, n,
                             i, 1, has_dht, has_dh0, scale, K, K, C, DECAY, False, VFIRST, TAIL, P, 2, True, 1)),
                (_copy, (bars, qs, ks, vs, qs, kd, qd, dob, kd, tile, last, h, H, 0, n, K, K, C, DECAY, P, 2, True)),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
    else:
        s = (pid - 2 * px) // px
        per = (n + stretches - 1) // stretches
        lo = gl.minimum(s * per, n)
        m = gl.minimum(per, n - lo)
        row += lo * C
        length -= lo * C
        tile = (first + lo) * H + h
        if SPLIT:
            slot = i * stretches + s
            gl.warp_specialize(
                [
                    (_compute, (bars, qs, ks, vs, qs, ps, os, dq, dqd, k, gamma, entry, k, k, tile, row, length, h, H,
                                0, m, slot, 1, 1, 0, scale, K, K, C, DECAY, False, False, TAIL, P, 2, False, 0)),
                    (_compute, (bars, qs, ks, vs, qs, ps, os, dq, dqd, k, gamma, entry, k, k, tile, row, length, h, H,
                                0, m, slot, 1, 1, 0, scale, K, K, C, DECAY, False, False, TAIL, P, 2, False, 1)),
                    (_copy, (bars, qs, ks, vs, qs, dod, vd, kb, dod, tile, row, h, H, 0, m, K, K, C, DECAY, P, 2,
                             False)),
                ],
                [4, 1],
                [232, 40],
            )  # fmt: skip
        else:
            gl.warp_specialize(
                [
                    (_compute, (bars, qs, ks, vs, qs, ps, os, dq, dqd, k, gamma, h0, k, k, tile, row, length, h, H,
                                0, m, i, 1, has_h0, 0, scale, K, K, C, DECAY, False, KFIRST, TAIL, P, 2, False, 0)),
                    (_compute, (bars, qs, ks, vs, qs, ps, os, dq, dqd, k, gamma, h0, k, k, tile, row, length, h, H,
                                0, m, i, 1, has_h0, 0, scale, K, K, C, DECAY, False, KFIRST, TAIL, P, 2, False, 1)),
                    (_copy, (bars, qs, ks, vs, qs, dod, vd, kb, dod, tile, row, h, H, 0, m, K, K, C, DECAY, P, 2,
                             False)),
                ],
                [4, 1],
                [232, 40],
            )  # fmt: skip
