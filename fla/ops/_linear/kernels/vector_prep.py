# SPDX-License-Identifier: MIT
# mypy: ignore-errors
# ruff: noqa: SIM102  (a compile-time and a run-time condition are two statements)
"""First kernel of linear attention with a decay per key channel: scaled tiles and scores of each chunk.

With b the sums of log decays (base 2) from a chunk's start, up to and with the token, and L its last row, a chunk's
work is products of ``q e^b``, ``k e^(b_L - b)`` and ``A[i, j] = sum_d q_id k_jd e^(b_id - b_jd)``. The scores have two
forms, both exact:

- mild gates, where no channel loses more than `SPAN` bits in the chunk: one product of ``q e^(b + 64)`` and
  ``k e^(-b - 64)``, whose factors stay inside the range of fp32 and bf16;
- any gates: a tree. Blocks of 64, 32, .. 2 tokens are split in the middle; a token of the second half is scaled by its
  decay from the middle on, one of the first half by the decay up to the middle. No factor exceeds 1, and every sum is
  over the tokens it is about, so infinities and cancellation have no place to arise.

Each program looks at its own gates and takes the form that fits.
"""

import triton
import triton.language as tl

from fla.ops._common.kernels import LOG2E, chunk_at
from fla.ops._common.vector_math import ex2, level_pairs, load_tile, narrow, store_tile, token_sum
from fla.ops._linear.kernels.half import fit_tile

# Half the span: the factors of mild gates lie in 2^-64 .. 2^64.
SHIFT = tl.constexpr(64.0)
UNSHIFT = tl.constexpr(2.0**-64)
SPAN = tl.constexpr(124.0)
# 2^-256 is 0 in fp32, so a stronger decay need not be told from it; -inf would give NaN in the 0/1 products.
FLOOR_BITS = tl.constexpr(-256.0)
FLOOR_NAT = tl.constexpr(-178.0)


@triton.jit
def one_matrix(ones, index, N: tl.constexpr):
    """0/1 matrix ``index`` [N, N] of the constants that `vector_launch.sum_matrices` builds."""
    r = tl.arange(0, N)
    return tl.load(ones + index * (N * N) + r[:, None] * N + r[None, :])


@triton.jit
def gate_operand(x, GPREC: tl.constexpr):
    """Log decays (nat) as operand of the sums, cut at the floor: in bits, or as they are ("raw", bf16)."""
    if GPREC == "raw":
        return tl.where(x < FLOOR_NAT, FLOOR_NAT, x).to(tl.bfloat16)
    else:
        y = x.to(tl.float32) * LOG2E
        y = tl.where(y < FLOOR_BITS, FLOOR_BITS, y)
        if GPREC == "fp16":
            y = y.to(tl.float16)
        return y


@triton.jit
def gate_bits(gs, GPREC: tl.constexpr):
    """Log decays in bits from their operand."""
    if GPREC == "raw":
        return gs.to(tl.float32) * LOG2E
    else:
        return gs.to(tl.float32)


@triton.jit
def is_mild(gl, TOKENS: tl.constexpr):
    """Whether log decays in bits, tokens along the axis TOKENS, stay inside `SPAN`; growth counts twice."""
    return tl.max(tl.sum(tl.maximum(gl * -1.0, gl * 2.0), TOKENS), 0) < SPAN


@triton.jit
def mild_scores(
    P, qn, kn, gs, gl, total, tiles, ones, t0, c0, C: tl.constexpr, KP: tl.constexpr, KB: tl.constexpr,
    READ: tl.constexpr, BONUS: tl.constexpr, DT: tl.constexpr, SD: tl.constexpr, PREC: tl.constexpr,
    GPREC: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    G = token_sum(one_matrix(ones, 0, C), gs, GPREC)
    if BONUS:
        Ei = ex2((G + gl + SHIFT) * -1.0)
    else:
        Ei = ex2((G + SHIFT) * -1.0)
    kc = kn * Ei
    store_tile(tiles, narrow(kc * ex2(total + SHIFT)[None, :], DT), t0 + C, C, c0, KP, KP, C, KB, TMA, False, False)
    if READ:
        qr = qn * ex2(G + SHIFT)
        P = tl.dot(narrow(qr, SD), tl.trans(narrow(kc, SD)), P, input_precision=PREC)
        store_tile(tiles, narrow(qr * UNSHIFT, DT), t0, C, c0, KP, KP, C, KB, TMA, False, False)
    return P


@triton.jit
def tree_scores(
    P, qn, kn, gs, tiles, ones, t0, c0, C: tl.constexpr, KP: tl.constexpr, KB: tl.constexpr, LEVELS: tl.constexpr,
    READ: tl.constexpr, BONUS: tl.constexpr, DT: tl.constexpr, SD: tl.constexpr, PREC: tl.constexpr,
    GPREC: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    ku = kn * ex2(token_sum(one_matrix(ones, 1, C), gs, GPREC))
    store_tile(tiles, narrow(ku, DT), t0 + C, C, c0, KP, KP, C, KB, TMA, False, False)
    if READ:
        qd = qn * ex2(token_sum(one_matrix(ones, 0, C), gs, GPREC))
        store_tile(tiles, narrow(qd, DT), t0, C, c0, KP, KP, C, KB, TMA, False, False)
        if not BONUS:
            r = tl.arange(0, C)
            P += tl.where(r[:, None] == r[None, :], tl.sum(qn * kn, 1)[:, None], 0.0)
        for lv in tl.range(0, LEVELS):
            f = ex2(token_sum(one_matrix(ones, 2 + lv, C), gs, GPREC))
            s = tl.dot(narrow(qn * f, SD), tl.trans(narrow(kn * f, SD)), input_precision=PREC)
            P += tl.where(level_pairs((C // 2) >> lv, C), s, 0.0)
    return P


@triton.jit
def block_scores(
    P, own, decay, q, k, g, u, tiles, ones, row, n, h, H, w, scale, c0, C: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, KB: tl.constexpr, LEVELS: tl.constexpr, READ: tl.constexpr, BONUS: tl.constexpr,
    FAST: tl.constexpr, DT: tl.constexpr, SD: tl.constexpr, PREC: tl.constexpr, GPREC: tl.constexpr,
    ROWS: tl.constexpr, TMA: tl.constexpr, GTMA: tl.constexpr,
):  # fmt: skip
    """Tiles of KB channels of one chunk; adds their share to the scores ``P`` and the bonus ``own``."""
    COLS: tl.constexpr = K != KP
    cc = c0 + tl.arange(0, KB)
    t0 = w * (2 * C)
    x = load_tile(g, row, n, h * K + c0, K - c0, H * K, C, KB, GTMA, ROWS, COLS)
    kt = load_tile(k, row, n, h * K + c0, K - c0, H * K, C, KB, TMA, ROWS, COLS)
    if READ:
        qt = load_tile(q, row, n, h * K + c0, K - c0, H * K, C, KB, TMA, ROWS, COLS)
    gs = gate_operand(x, GPREC)
    gl = gate_bits(gs, GPREC)
    total = tl.sum(gl, 0)
    tl.store(decay + w.to(tl.int64) * KP + cc, ex2(total))
    kn = kt.to(tl.float32)
    qn = kn
    if READ:
        qn = qt.to(tl.float32) * scale
    if BONUS:
        ut = tl.load(u + h * K + cc, mask=cc < K, other=0.0).to(tl.float32)
        own += tl.sum(qn * kn * ut[None, :], 1)
    # Without scores both forms are one product; only the tree's, because ptxas 12.8 drops the product of a branch in
    # which nothing else is multiplied (see `fla.ops._common.audit`).
    mild = READ and FAST == 2
    if READ and FAST == 1:
        mild = is_mild(gl, 0)
    if mild:
        P = mild_scores(
            P, qn, kn, gs, gl, total, tiles, ones, t0, c0, C, KP, KB, READ, BONUS, DT, SD, PREC, GPREC, TMA
        )  # fmt: skip
    else:
        P = tree_scores(
            P, qn, kn, gs, tiles, ones, t0, c0, C, KP, KB, LEVELS, READ, BONUS, DT, SD, PREC, GPREC, TMA
        )  # fmt: skip
    return P, own


@triton.jit(do_not_specialize=["T", "NT", "H", "chunks", "per"])
def vector_prep(
    decay, q, k, g, u, table, ones, tiles, mats, weights, T, NT, H, chunks, per, scale, C: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, KB: tl.constexpr, LEVELS: tl.constexpr, READ: tl.constexpr, BONUS: tl.constexpr,
    FAST: tl.constexpr, DT: tl.constexpr, SD: tl.constexpr, PREC: tl.constexpr, GPREC: tl.constexpr,
    VARLEN: tl.constexpr, ROWS: tl.constexpr, TMA: tl.constexpr, GTMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program per (``per`` chunks, head). Writes, for tile ``w = chunk * H + h``:

        tiles [w, 2, C, KP]: ``scale q e^b`` (BONUS: with the sums before the token) and ``k e^(b_L - b)``
        mats [w, C, C]: A, with the scale; zero above the diagonal (BONUS: on it ``scale sum q u k``); of float16
            divided by weights [w]
        decay [w, KP]: ``e^(b_L)``

    READ off: q is not looked at; no q tile, no A. Rows past the sequence are written as 0.
    """
    NK: tl.constexpr = KP // KB
    h = tl.program_id(0) % H
    i0 = tl.program_id(0) // H * per
    r = tl.arange(0, C)
    P = tl.zeros((C, C), tl.float32)
    own = tl.zeros((C,), tl.float32)
    # One loop over chunks and their blocks of channels: only the innermost loop loads ahead.
    for j in tl.range(i0 * NK, tl.minimum(i0 + per, chunks) * NK, num_stages=STAGES):
        it = j // NK
        b = j % NK
        row, n = chunk_at(table, it, T, NT, C, VARLEN)
        w = it * H + h
        P, own = block_scores(
            P, own, decay, q, k, g, u, tiles, ones, row, n, h, H, w, scale, b * KB, C, K, KP, KB, LEVELS, READ, BONUS,
            FAST, DT, SD, PREC, GPREC, ROWS, TMA, GTMA,
        )  # fmt: skip
        if READ:
            if b == NK - 1:
                if BONUS:
                    A = tl.where(r[:, None] > r[None, :], P, tl.where(r[:, None] == r[None, :], own[:, None], 0.0))
                else:
                    A = tl.where(r[:, None] >= r[None, :], P, 0.0)
                if tl.float16 == DT:
                    A, weight, _ = fit_tile(A, DT)
                    tl.store(weights + w, weight)
                store_tile(mats, narrow(A, DT) if tl.float16 != DT else A, w * C, C, 0, C, C, C, C, TMA, False, False)
                P = tl.zeros((C, C), tl.float32)
                own = tl.zeros((C,), tl.float32)
