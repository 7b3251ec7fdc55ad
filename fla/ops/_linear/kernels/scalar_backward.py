# SPDX-License-Identifier: MIT
# mypy: ignore-errors
"""Passes of the backward of linear attention side by side in one launch, so that together they fill the chip.

A program of each fills a multiprocessor, and one pass alone seldom has as many programs as the chip has
multiprocessors. The longest come first.
"""

import triton
import triton.language as tl

from fla.ops._linear.kernels.scalar_reverse import reverse_program
from fla.ops._linear.kernels.scalar_scan import scan_program
from fla.ops._linear.kernels.scalar_states import states_program


@triton.jit(do_not_specialize=["T", "NT", "H", "N", "has_h0", "has_dht", "has_dh0", "segments", "stretches"])
def scalar_thrice(
    q, k, v, do, qd, kd, vd, dod, qb, kb, dob, sums, gamma, dq, dqd, dk, dkd, dv, dvd, h0, dht, dh0, entry, back, cu,
    offsets, T, NT, H, N, has_h0, has_dht, has_dh0, segments, stretches, scale, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, CK: tl.constexpr, CV: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr,
    SPLITX: tl.constexpr, SPLITS: tl.constexpr, VFIRST: tl.constexpr, VARLEN: tl.constexpr, DESC: tl.constexpr,
    DOT: tl.constexpr, DSTORE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of q, k, v and the initial state where decays have none: `scalar_scan` in its three other roles.

    BK, BV: whole blocks; CK, CV: columns of K or V that a program writes (descriptors qb, kb, dob). ``segments`` and
    ``back`` are stretches of the two scans in reverse, ``stretches`` and ``entry`` those of dq.
    """
    NK: tl.constexpr = (K + CK - 1) // CK
    NV: tl.constexpr = (V + CV - 1) // CV
    KFIRST: tl.constexpr = not VFIRST
    pid = tl.program_id(0)
    px = H * N * segments if SPLITX == 1 else H * N
    if pid < px * NK:
        scan_program(
            pid, v, do, q, vd, dod, qb, sums, gamma, q, dk, dkd, dht, dh0, back, cu, offsets, T, NT, H, has_dht, 0,
            segments, scale, V, K, BV, CK, C, DECAY, False, SPLITX, True, KFIRST, False, VARLEN, DESC, DOT, DSTORE,
            STAGES,
        )  # fmt: skip
    elif pid < px * (NK + NV):
        scan_program(
            pid - px * NK, k, q, do, kd, qd, dob, sums, gamma, q, dv, dvd, dht, dh0, back, cu, offsets, T, NT, H,
            has_dht, has_dh0, segments, scale, K, V, BK, CV, C, DECAY, False, SPLITX, True, VFIRST, True, VARLEN, DESC,
            DOT, DSTORE, STAGES,
        )  # fmt: skip
    else:
        scan_program(
            pid - px * (NK + NV), do, v, k, dod, vd, kb, sums, gamma, q, dq, dqd, h0, dh0, entry, cu, offsets, T, NT, H,
            has_h0, 0, stretches, scale, V, K, BV, CK, C, DECAY, False, SPLITS, False, KFIRST, False, VARLEN, DESC, DOT,
            DSTORE, STAGES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T", "NT", "H", "N", "has_h0", "has_dht", "has_dh0", "segments"])
def scalar_both(
    q, k, v, do, qd, kd, vd, dod, sums, gamma, dv, dvd, St, Sd, Sf, Xt, Xd, Xf, h0, dht, dh0, entry, back, cu, offsets,
    T, NT, H, N, has_h0, has_dht, has_dh0, segments, scale, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, SV: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr, SPLIT: tl.constexpr, VFIRST: tl.constexpr,
    VARLEN: tl.constexpr, DESC: tl.constexpr, DOT: tl.constexpr, STAGES: tl.constexpr, STATE_STAGES: tl.constexpr,
):  # fmt: skip
    """`scalar_reverse` and `scalar_states`: dv, the state before each chunk and its gradient after it.

    BV, SV: columns of V of a program of either (descriptors dod, dvd, Xd; vd, Sd).
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    p = NV * H * N * segments
    if pid < p:
        reverse_program(
            pid, q, k, do, qd, kd, dod, sums, gamma, dv, dvd, Xt, Xd, Xf, dht, dh0, back, cu, offsets, T, NT, H,
            has_dht, has_dh0, segments, scale, K, V, BK, BV, C, DECAY, SPLIT, VFIRST, VARLEN, DESC, DOT, STAGES,
        )  # fmt: skip
    else:
        states_program(
            pid - p, k, v, kd, vd, sums, gamma, St, Sd, Sf, h0, dh0, entry, sums, cu, offsets, T, NT, H, has_h0, 0,
            segments, segments, scale, K, V, BK, SV, C, DECAY, False, SPLIT, VFIRST, VARLEN, DESC, True, DOT,
            STATE_STAGES,
        )  # fmt: skip
