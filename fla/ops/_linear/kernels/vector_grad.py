# SPDX-License-Identifier: MIT
# mypy: ignore-errors
"""What is local to a chunk in the backward of linear attention with a decay per key channel.

With S the state before the chunk, X the gradient of the state after it and ``dA = tril(do v^T)``:

    dq_i = scale (e^b_i (S do_i) + sum_j dA_ij e^(b_i - b_j) k_j)
    dk_j = e^(b_L - b_j) (X v_j) + scale sum_i dA_ij e^(b_i - b_j) q_i

and the gradient of a log decay sums what passes over its token: what is read from S (until its reader), what is written
to X (from its writer), <S, X>, and pairs. The two forms are those of `vector_prep`. In the tree nothing cancels. With
mild gates the pairs on one side of a token do: every operand and every score gradient is rounded once and weighs both
sides, so that they cancel exactly.

Wide tiles are `[channels, tokens]`: they come out of one product and go into the next as register operands, and the
small matrices (score gradients, 0/1 sums over tokens) are the operands in shared memory.
"""

import triton
import triton.language as tl

from fla.ops._common.kernels import LOG2E, chunk_at, saturate
from fla.ops._common.vector_math import ex2, gate_sum, grad_sum, level_pairs, load_tile, narrow, split_gates, store_tile
from fla.ops._linear.kernels.half import even_rows
from fla.ops._linear.kernels.vector_prep import SHIFT, UNSHIFT, gate_bits, gate_operand, is_mild, one_matrix


@triton.jit
def product(x, A, B, PREC: tl.constexpr, ONE: tl.constexpr):
    """``A^T B^T`` of two tiles (ONE: there is one V block), made where it is used; else ``x``, their sum so far.

    Of one block in float16 ``x`` is the factor of A.
    """
    if ONE and tl.float16 == A.dtype:
        return tl.dot(tl.trans(A), tl.trans(B), input_precision=PREC) * x
    elif ONE:
        return tl.dot(tl.trans(A), tl.trans(B), input_precision=PREC)
    else:
        return x


@triton.jit
def put(
    p, x, row, n, h, H, c0, K: tl.constexpr, KB: tl.constexpr, C: tl.constexpr, OT: tl.constexpr, TMA: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Store `[channels, tokens]` as rows of a `[rows, H, K]` tensor."""
    COLS: tl.constexpr = ((K & (K - 1)) != 0) or (K < KB)
    store_tile(p, tl.trans(x.to(OT)), row, n, h * K + c0, K - c0, H * K, C, KB, TMA, ROWS, COLS)


@triton.jit
def over_channels(x, c0, K: tl.constexpr, KB: tl.constexpr):
    """Softmax of `[channels, tokens]` over all channels."""
    c = c0 + tl.arange(0, KB)
    x = tl.where((c < K)[:, None], x * LOG2E, float("-inf"))
    x = ex2(x - tl.max(x, 0)[None, :])
    return x / tl.sum(x, 0)[None, :]


@triton.jit
def mild_pairs(
    qn, kn, QS, VX, St, Xt, dot, vt, dA, gh, gr, gl, total, ss, own_q, own_k, ones, dq, dk, dg, row, n, h, H, c0, scale,
    C: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, ONE: tl.constexpr, FULL: tl.constexpr, SOFT: tl.constexpr,
    BONUS: tl.constexpr, SD: tl.constexpr, PREC: tl.constexpr, RAW: tl.constexpr, QT: tl.constexpr, KT: tl.constexpr,
    GT: tl.constexpr, TMA: tl.constexpr, GTMA: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tri = one_matrix(ones, 0, C)
    G = gate_sum(gh, gr, tl.trans(tri), SD, PREC, RAW)
    E = ex2(G + SHIFT) * scale
    if BONUS:
        G += gl
    Ei = ex2((G + SHIFT) * -1.0)
    Ab = narrow(dA, SD)
    kc = narrow(kn * Ei, SD)
    p = tl.dot(kc, tl.trans(Ab), input_precision=PREC)
    p += product(QS, St, dot, PREC, ONE) * UNSHIFT
    xq = E * p
    if BONUS:
        xq += own_q * scale
    if SOFT:
        xq = over_channels(xq, c0, K, KB)
    if not FULL:
        # An output; gradients that float16 cannot hold show as infinity.
        xq = saturate(xq, QT)
    put(dq, xq, row, n, h, H, c0, K, KB, C, QT, TMA, ROWS)
    if FULL:
        # With the sum of all that is written, what is written before a token is what is not written from it on: one
        # sum over tokens serves everything that ends or begins there.
        qr = narrow(qn * E, SD)
        over = qr.to(tl.float32) * p
        p = tl.dot(qr, Ab, input_precision=PREC)
        y = product(VX, Xt, vt, PREC, ONE) * ex2(total + SHIFT)[:, None]
        kf = kc.to(tl.float32)
        ss += tl.sum(kf * y, 1)
        p += y
        y = kf * p
        over -= y
        p = Ei * p
        if BONUS:
            p += own_k
        put(dk, p, row, n, h, H, c0, K, KB, C, KT, TMA, ROWS)
        xg = grad_sum(over, tri, SD, PREC, True) + ss[:, None]
        if BONUS:
            xg -= y
        put(dg, xg, row, n, h, H, c0, K, KB, C, GT, GTMA, ROWS)


@triton.jit
def tree_pairs(
    qn, kn, QS, VX, St, Xt, dot, vt, dA, diag, gh, gr, ss, own_q, own_k, ones, dq, dk, dg, row, n, h, H, c0, scale,
    C: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, LEVELS: tl.constexpr, ONE: tl.constexpr, FULL: tl.constexpr,
    SOFT: tl.constexpr, BONUS: tl.constexpr, SD: tl.constexpr, PREC: tl.constexpr, RAW: tl.constexpr,
    QT: tl.constexpr, KT: tl.constexpr,
    GT: tl.constexpr, TMA: tl.constexpr, GTMA: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    qn = qn * scale
    tri = one_matrix(ones, 0, C)
    xq = ex2(gate_sum(gh, gr, tl.trans(tri), SD, PREC, RAW)) * product(QS, St, dot, PREC, ONE)
    xk = xq
    xg = xq
    if FULL:
        xg = grad_sum(qn * xq, tri, SD, PREC, False) + ss[:, None]
        tru = one_matrix(ones, 1, C)
        xk = ex2(gate_sum(gh, gr, tl.trans(tru), SD, PREC, RAW)) * product(VX, Xt, vt, PREC, ONE)
        xg += grad_sum(kn * xk, tru, SD, PREC, False)
    if BONUS:
        xq += own_q
        if FULL:
            xk += own_k
    else:
        xq += diag * kn
        if FULL:
            xk += diag * qn
    for lv in tl.range(0, LEVELS):
        m = one_matrix(ones, 2 + lv, C)
        f = ex2(gate_sum(gh, gr, tl.trans(m), SD, PREC, RAW))
        Al = narrow(tl.where(level_pairs((C // 2) >> lv, C), dA, 0.0), SD)
        kk = kn * f
        p = tl.dot(narrow(kk, SD), tl.trans(Al), input_precision=PREC)
        xq += f * p
        if FULL:
            qq = qn * f
            over = qq * p
            p = tl.dot(narrow(qq, SD), Al, input_precision=PREC)
            over += kk * p
            xk += f * p
            xg += grad_sum(over, m, SD, PREC, False)
    xq = xq * scale
    if SOFT:
        xq = over_channels(xq, c0, K, KB)
    if not FULL:
        # An output; gradients that float16 cannot hold show as infinity.
        xq = saturate(xq, QT)
    put(dq, xq, row, n, h, H, c0, K, KB, C, QT, TMA, ROWS)
    if FULL:
        put(dk, xk, row, n, h, H, c0, K, KB, C, KT, TMA, ROWS)
        put(dg, xg, row, n, h, H, c0, K, KB, C, GT, GTMA, ROWS)


@triton.jit(do_not_specialize=["T", "NT", "H"])
def vector_grad(
    decay, q, k, g, u, v, do, states, exits, factors, exit_factors, ones, table, dq, dk, dg, du, T, NT, H, scale,
    C: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, KB: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    VB: tl.constexpr, LEVELS: tl.constexpr, FULL: tl.constexpr, SOFT: tl.constexpr, BONUS: tl.constexpr,
    FAST: tl.constexpr, SD: tl.constexpr, PREC: tl.constexpr, GPREC: tl.constexpr, QT: tl.constexpr, KT: tl.constexpr,
    GT: tl.constexpr, VARLEN: tl.constexpr, ROWS: tl.constexpr, TMA: tl.constexpr, GTMA: tl.constexpr,
):  # fmt: skip
    """One program per (KB channels, chunk, head). dq, dk, dg: `[rows, H, K]`; du: fp32 parts `[chunks, H, K]`.

    FULL off: only dq, which is also the output of a recurrence whose values decay (see `vector_autograd.ValueDecay`).
    SOFT: its softmax over channels, which must be one block then.
    """
    NG: tl.constexpr = KP // KB
    RAW: tl.constexpr = GPREC == "raw"
    HALF: tl.constexpr = tl.float16 == states.dtype.element_ty
    pid = tl.program_id(0)
    c0 = (pid % NG) * KB
    h = (pid // NG) % H
    it = pid // (NG * H)
    cc = tl.arange(0, KB)
    ck = c0 + cc
    row, n = chunk_at(table, it, T, NT, C, VARLEN)
    if n <= 0:
        if FULL and BONUS:
            tl.store(du + (it.to(tl.int64) * H + h) * K + ck, tl.zeros((KB,), tl.float32), mask=ck < K)
        return
    NVB: tl.constexpr = VP // VB
    ONE: tl.constexpr = NVB == 1
    VC: tl.constexpr = V != VP
    KC: tl.constexpr = K != KP
    w = it * H + h
    r = tl.arange(0, C)
    # All loads first: nothing else is held yet, and they travel together.
    x = load_tile(g, row, n, h * K + c0, K - c0, H * K, C, KB, False, ROWS, KC)
    kt = load_tile(k, row, n, h * K + c0, K - c0, H * K, C, KB, False, ROWS, KC)
    if FULL:
        qt = load_tile(q, row, n, h * K + c0, K - c0, H * K, C, KB, False, ROWS, KC)
    dA = tl.zeros((C, C), tl.float32)
    QS = dA
    VX = dA
    if not ONE:
        QS = tl.zeros((KB, C), tl.float32)
        VX = QS
    ss = tl.zeros((KB,), tl.float32)
    for b in tl.static_range(NVB):
        dot = load_tile(do, row, n, h * V + b * VB, V - b * VB, H * V, C, VB, False, ROWS, VC)
        vt = load_tile(v, row, n, h * V + b * VB, V - b * VB, H * V, C, VB, False, ROWS, VC)
        St = load_tile(states, w * VP + b * VB, VB, c0, KP, KP, VB, KB, False, False, False)
        St, fs = even_rows(St, factors, w, b * VB, 0, KP, VP, KP, VB)
        Xt = St
        fx = fs
        if FULL:
            Xt = load_tile(exits, w * VP + b * VB, VB, c0, KP, KP, VB, KB, False, False, False)
            Xt, fx = even_rows(Xt, exit_factors, w, b * VB, 0, KP, VP, KP, VB)
            part = tl.sum(St.to(tl.float32) * Xt.to(tl.float32), 0)
            if HALF:
                part = part * fs * fx
            ss += part
        if ONE and HALF:
            QS = fs
            VX = fx
        dA = tl.dot(dot, tl.trans(vt), dA, input_precision=PREC)
        if not ONE:
            part = tl.dot(tl.trans(St), tl.trans(dot), input_precision=PREC)
            QS += part * fs if HALF else part
            if FULL:
                part = tl.dot(tl.trans(Xt), tl.trans(vt), input_precision=PREC)
                VX += part * fx if HALF else part
    diag = tl.sum(tl.where(r[:, None] == r[None, :], dA, 0.0), 0)[None, :]
    if BONUS:
        dA = tl.where(r[:, None] > r[None, :], dA, 0.0)
    else:
        dA = tl.where(r[:, None] >= r[None, :], dA, 0.0)
    gs = gate_operand(tl.trans(x), "raw" if RAW else "bits")
    gl = gate_bits(gs, "raw" if RAW else "bits")
    gh, gr = split_gates(gs, SD, RAW)
    kn = tl.trans(kt).to(tl.float32)
    qn = kn
    if FULL:
        qn = tl.trans(qt).to(tl.float32)
        ss = ss * tl.load(decay + w.to(tl.int64) * KP + ck)
    own_q = kn
    own_k = kn
    if BONUS:
        ut = tl.load(u + h * K + ck, mask=ck < K, other=0.0).to(tl.float32)[:, None]
        own_q = diag * ut * kn
        if FULL:
            y = diag * qn * scale
            own_k = y * ut
            tl.store(du + (it.to(tl.int64) * H + h) * K + ck, tl.sum(y * kn, 1), mask=ck < K)
    total = tl.sum(gl, 1)
    mild = FAST == 2
    if FAST == 1:
        mild = is_mild(gl, 1)
        if ROWS:
            # A few tokens may all be strong and the chunk mild: what is left of the gates' gradient is then far below
            # what cancels. Four bits a token, on average, are the most that a full chunk can have in fp32.
            mild = mild & (tl.min(total, 0) > n * -4.0)
    if mild:
        mild_pairs(
            qn, kn, QS, VX, St, Xt, dot, vt, dA, gh, gr, gl, total, ss, own_q, own_k, ones, dq, dk, dg, row, n, h, H,
            c0, scale, C, K, KB, ONE, FULL, SOFT, BONUS, SD, PREC, RAW, QT, KT, GT, TMA, GTMA, ROWS,
        )  # fmt: skip
    else:
        tree_pairs(
            qn, kn, QS, VX, St, Xt, dot, vt, dA, diag, gh, gr, ss, own_q, own_k, ones, dq, dk, dg, row, n, h, H, c0,
            scale, C, K, KB, LEVELS, ONE, FULL, SOFT, BONUS, SD, PREC, RAW, QT, KT, GT, TMA, GTMA, ROWS,
        )  # fmt: skip
