# SPDX-License-Identifier: MIT
# mypy: ignore-errors
"""Kernels of the short convolution, for up to four taps.

A thread owns a few channels and walks down the rows of a chunk with its last inputs (backward: and its last
pre-activation gradients) in registers, so that every row is read once and the activation is evaluated once a row.
Four rows are loaded before the first is used, to keep enough bytes in flight; AHEAD loads the next four before these.

Tap ``k0`` multiplies the current input, ``k1`` the one before, and so on. Lags beyond `W` are never computed, not
multiplied by zero: an infinite input reaches exactly the outputs of its window.
"""

import triton
import triton.language as tl


@triton.jit
def _chunk(table, it, T, NT, C, cu, VARLEN: tl.constexpr):
    """Batch, first row in it, rows, sequence, chunk number and rows from the chunk's first to the sequence's end."""
    if VARLEN:
        b = 0
        row = tl.load(table + it * 4)
        n = tl.load(table + it * 4 + 1)
        seq = tl.maximum(tl.load(table + it * 4 + 2), 0)
        c = tl.load(table + it * 4 + 3)
        rest = tl.minimum(tl.load(cu + seq + 1).to(tl.int32), T) - row
    else:
        b = it // NT
        c = it % NT
        row = c * C
        n = tl.minimum(T - row, C)
        seq = b
        rest = T - row
    return b, row, n, seq, c, rest


@triton.jit
def _past(x, state, i: tl.constexpr, st, seq, c, cols, mask, D, W: tl.constexpr, HAS_STATE: tl.constexpr):
    """The input ``i`` rows before the chunk: of the chunk before, or what the caller carries into the sequence."""
    v = tl.load(x - i * st + cols, mask=mask & (c > 0), other=0.0).to(tl.float32)
    if HAS_STATE:
        at = (seq.to(tl.int64) * D + cols) * W + (W - i)
        v += tl.load(state + at, mask=mask & (c == 0), other=0.0).to(tl.float32)
    return v


@triton.jit
def _sigmoid(p):
    """By the square of an inverse root: that and ``exp2`` are one instruction each, where ``1 / x`` and ``exp`` also
    scale huge and tiny arguments, of which there are none here."""
    r = tl.rsqrt(1.0 + tl.exp2(p * -1.4426950408889634))
    return r * r


@triton.jit
def _four(x, r, n, st, mask):
    """Rows ``r`` to ``r + 3`` of `n`; ``x`` points at the first."""
    q0 = tl.load(x, mask=mask & (r < n), other=0.0)
    q1 = tl.load(x + st, mask=mask & (r + 1 < n), other=0.0)
    q2 = tl.load(x + 2 * st, mask=mask & (r + 2 < n), other=0.0)
    q3 = tl.load(x + 3 * st, mask=mask & (r + 3 < n), other=0.0)
    return q0, q1, q2, q3


@triton.jit
def _history(x, state, st, seq, c, cols, mask, D, W: tl.constexpr, HAS_STATE: tl.constexpr):
    x1 = tl.zeros(cols.shape, tl.float32)
    x2 = x1
    x3 = x1
    if W > 1:
        x1 = _past(x, state, 1, st, seq, c, cols, mask, D, W, HAS_STATE)
    if W > 2:
        x2 = _past(x, state, 2, st, seq, c, cols, mask, D, W, HAS_STATE)
    if W > 3:
        x3 = _past(x, state, 3, st, seq, c, cols, mask, D, W, HAS_STATE)
    return x1, x2, x3


@triton.jit
def _taps(weight, bias, cols, mask, W: tl.constexpr, HAS_BIAS: tl.constexpr):
    zero = tl.zeros(cols.shape, tl.float32)
    k0 = tl.load(weight + cols * W + (W - 1), mask=mask, other=0.0).to(tl.float32)
    k1 = zero
    k2 = zero
    k3 = zero
    b = zero
    if W > 1:
        k1 = tl.load(weight + cols * W + (W - 2), mask=mask, other=0.0).to(tl.float32)
    if W > 2:
        k2 = tl.load(weight + cols * W + (W - 3), mask=mask, other=0.0).to(tl.float32)
    if W > 3:
        k3 = tl.load(weight + cols * W + (W - 4), mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        b = tl.load(bias + cols, mask=mask, other=0.0).to(tl.float32)
    return k0, k1, k2, k3, b


@triton.jit
def _sum(b, k0, k1, k2, k3, x0, x1, x2, x3, W: tl.constexpr):
    p = b + k0 * x0
    if W > 1:
        p += k1 * x1
    if W > 2:
        p += k2 * x2
    if W > 3:
        p += k3 * x3
    return p


@triton.jit
def _out(y, residual, keep, p, SILU: tl.constexpr, HAS_RES: tl.constexpr):
    if SILU:
        p = p * _sigmoid(p)
    if HAS_RES:
        p += tl.load(residual, mask=keep, other=0.0).to(tl.float32)
    tl.store(y, p.to(y.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["T", "NT", "C", "DV", "xb", "xt", "rb", "rt"])
def conv_fwd(
    x, weight, bias, residual, state, y, table, cu, T, NT, C, DV, xb, xt, rb, rt, W: tl.constexpr, VEC: tl.constexpr,
    BD: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RES: tl.constexpr, HAS_STATE: tl.constexpr,
    VARLEN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Strides and `D` come in units of ``VEC`` elements, which tells the compiler how wide it may load."""
    D = DV * VEC
    ND = (D + BD - 1) // BD
    pid = tl.program_id(0)
    cols = (pid % ND) * BD + tl.arange(0, BD)
    mask = cols < D
    b, row, n, seq, c, _ = _chunk(table, pid // ND, T, NT, C, cu, VARLEN)
    st = xt.to(tl.int64) * VEC
    sr = rt.to(tl.int64) * VEC
    b64 = b + tl.zeros((), tl.int64)
    x += b64 * xb * VEC + row * st
    residual += b64 * rb * VEC + row * sr
    y += (b64 * T + row) * D
    k0, k1, k2, k3, bb = _taps(weight, bias, cols, mask, W, HAS_BIAS)
    x1, x2, x3 = _history(x, state, st, seq, c, cols, mask, D, W, HAS_STATE)
    px = x + cols
    py = y + cols
    pr = residual + cols
    sd = D.to(tl.int64)
    if AHEAD:
        a0, a1, a2, a3 = _four(px, 0, n, st, mask)
    for r in range(0, n, 4):
        if AHEAD:
            q0, q1, q2, q3 = a0, a1, a2, a3
            px += 4 * st
            a0, a1, a2, a3 = _four(px, r + 4, n, st, mask)
        else:
            q0, q1, q2, q3 = _four(px, r, n, st, mask)
            px += 4 * st
        q0 = q0.to(tl.float32)
        q1 = q1.to(tl.float32)
        q2 = q2.to(tl.float32)
        q3 = q3.to(tl.float32)
        p0 = _sum(bb, k0, k1, k2, k3, q0, x1, x2, x3, W)
        p1 = _sum(bb, k0, k1, k2, k3, q1, q0, x1, x2, W)
        p2 = _sum(bb, k0, k1, k2, k3, q2, q1, q0, x1, W)
        p3 = _sum(bb, k0, k1, k2, k3, q3, q2, q1, q0, W)
        _out(py, pr, mask, p0, SILU, HAS_RES)
        _out(py + sd, pr + sr, mask & (r + 1 < n), p1, SILU, HAS_RES)
        _out(py + 2 * sd, pr + 2 * sr, mask & (r + 2 < n), p2, SILU, HAS_RES)
        _out(py + 3 * sd, pr + 3 * sr, mask & (r + 3 < n), p3, SILU, HAS_RES)
        py += 4 * sd
        pr += 4 * sr
        x1 = q3
        x2 = q2
        x3 = q1


@triton.jit
def _slope(dy, p, SILU: tl.constexpr):
    if SILU:
        s = _sigmoid(p)
        g = dy * s
        dy = g + g * (p - p * s)
    return dy


@triton.jit
def _dx(dx, dfinal, e, n, rest, at, mask, k0, k1, k2, k3, d0, d1, d2, d3, W: tl.constexpr, HAS_DFINAL: tl.constexpr):
    """Gradient of the input of row ``e``, to which ``dx`` points, and whose last reader is the row of ``d0``."""
    if W == 1:
        g = k0 * d0
    elif W == 2:
        g = k0 * d1 + k1 * d0
    elif W == 3:
        g = k0 * d2 + k1 * d1 + k2 * d0
    else:
        g = k0 * d3 + k1 * d2 + k2 * d1 + k3 * d0
    keep = mask & (e >= 0) & (e < n)
    if HAS_DFINAL:
        slot = e + W - rest
        g += tl.load(dfinal + at + slot, mask=keep & (slot >= 0), other=0.0).to(tl.float32)
    tl.store(dx, g.to(dx.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["T", "NT", "C", "DV", "xb", "xt", "yb", "yt"])
def conv_bwd(
    x, weight, bias, state, dy, dfinal, dx, part, table, cu, T, NT, C, DV, xb, xt, yb, yt, W: tl.constexpr,
    VEC: tl.constexpr, BD: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr,
    HAS_DFINAL: tl.constexpr, NEED_X: tl.constexpr, NEED_W: tl.constexpr, VARLEN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """``C`` is a multiple of four. ``part`` gets the sums over the chunk for taps and bias, `[chunks, W + 1, D]`."""
    D = DV * VEC
    ND = (D + BD - 1) // BD
    pid = tl.program_id(0)
    it = pid // ND
    cols = (pid % ND) * BD + tl.arange(0, BD)
    mask = cols < D
    b, row, n, seq, c, rest = _chunk(table, it, T, NT, C, cu, VARLEN)
    st = xt.to(tl.int64) * VEC
    sy = yt.to(tl.int64) * VEC
    b64 = b + tl.zeros((), tl.int64)
    x += b64 * xb * VEC + row * st
    dy += b64 * yb * VEC + row * sy
    dx += (b64 * T + row) * D
    k0, k1, k2, k3, bb = _taps(weight, bias, cols, mask, W, HAS_BIAS)
    x1, x2, x3 = _history(x, state, st, seq, c, cols, mask, D, W, HAS_STATE)
    at = (seq.to(tl.int64) * D + cols) * W
    L: tl.constexpr = W - 1
    sd = D.to(tl.int64)
    px = x + cols
    py = dy + cols
    pd = dx + cols - L * sd
    zero = tl.zeros((BD,), tl.float32)
    d1 = zero
    d2 = zero
    d3 = zero
    g0 = zero
    g1 = zero
    g2 = zero
    g3 = zero
    gb = zero
    if AHEAD:
        a0, a1, a2, a3 = _four(px, 0, n, st, mask)
        b0, b1, b2, b3 = _four(py, 0, n, sy, mask)
    for r in range(0, n, 4):
        if AHEAD:
            q0, q1, q2, q3 = a0, a1, a2, a3
            e0, e1, e2, e3 = b0, b1, b2, b3
            px += 4 * st
            py += 4 * sy
            a0, a1, a2, a3 = _four(px, r + 4, n, st, mask)
            b0, b1, b2, b3 = _four(py, r + 4, n, sy, mask)
        else:
            q0, q1, q2, q3 = _four(px, r, n, st, mask)
            e0, e1, e2, e3 = _four(py, r, n, sy, mask)
            px += 4 * st
            py += 4 * sy
        q0 = q0.to(tl.float32)
        q1 = q1.to(tl.float32)
        q2 = q2.to(tl.float32)
        q3 = q3.to(tl.float32)
        e0 = _slope(e0.to(tl.float32), _sum(bb, k0, k1, k2, k3, q0, x1, x2, x3, W), SILU)
        e1 = _slope(e1.to(tl.float32), _sum(bb, k0, k1, k2, k3, q1, q0, x1, x2, W), SILU)
        e2 = _slope(e2.to(tl.float32), _sum(bb, k0, k1, k2, k3, q2, q1, q0, x1, W), SILU)
        e3 = _slope(e3.to(tl.float32), _sum(bb, k0, k1, k2, k3, q3, q2, q1, q0, W), SILU)
        if NEED_X:
            _dx(pd, dfinal, r - L, n, rest, at, mask, k0, k1, k2, k3, e0, d1, d2, d3, W, HAS_DFINAL)
            _dx(pd + sd, dfinal, r + 1 - L, n, rest, at, mask, k0, k1, k2, k3, e1, e0, d1, d2, W, HAS_DFINAL)
            _dx(pd + 2 * sd, dfinal, r + 2 - L, n, rest, at, mask, k0, k1, k2, k3, e2, e1, e0, d1, W, HAS_DFINAL)
            _dx(pd + 3 * sd, dfinal, r + 3 - L, n, rest, at, mask, k0, k1, k2, k3, e3, e2, e1, e0, W, HAS_DFINAL)
        if NEED_W:
            g0 += e0 * q0 + e1 * q1 + e2 * q2 + e3 * q3
            if W > 1:
                g1 += e0 * x1 + e1 * q0 + e2 * q1 + e3 * q2
            if W > 2:
                g2 += e0 * x2 + e1 * x1 + e2 * q0 + e3 * q1
            if W > 3:
                g3 += e0 * x3 + e1 * x2 + e2 * x1 + e3 * q0
            if HAS_BIAS:
                gb += e0 + e1 + e2 + e3
        pd += 4 * sd
        x1 = q3
        x2 = q2
        x3 = q1
        d1 = e3
        d2 = e2
        d3 = e1
    if NEED_X and W > 1:
        # The first rows of the next chunk read the last inputs of this one. A chunk that has a next one is full.
        r = (n + 3) // 4 * 4
        px = x + r * st + cols
        py = dy + r * sy + cols
        q0 = tl.load(px, mask=mask & (r < rest), other=0.0).to(tl.float32)
        e0 = tl.load(py, mask=mask & (r < rest), other=0.0).to(tl.float32)
        e0 = _slope(e0, _sum(bb, k0, k1, k2, k3, q0, x1, x2, x3, W), SILU)
        _dx(pd, dfinal, r - L, n, rest, at, mask, k0, k1, k2, k3, e0, d1, d2, d3, W, HAS_DFINAL)
        if W > 2:
            q1 = tl.load(px + st, mask=mask & (r + 1 < rest), other=0.0).to(tl.float32)
            e1 = tl.load(py + sy, mask=mask & (r + 1 < rest), other=0.0).to(tl.float32)
            e1 = _slope(e1, _sum(bb, k0, k1, k2, k3, q1, q0, x1, x2, W), SILU)
            _dx(pd + sd, dfinal, r + 1 - L, n, rest, at, mask, k0, k1, k2, k3, e1, e0, d1, d2, W, HAS_DFINAL)
        if W > 3:
            q2 = tl.load(px + 2 * st, mask=mask & (r + 2 < rest), other=0.0).to(tl.float32)
            e2 = tl.load(py + 2 * sy, mask=mask & (r + 2 < rest), other=0.0).to(tl.float32)
            e2 = _slope(e2, _sum(bb, k0, k1, k2, k3, q2, q1, q0, x1, W), SILU)
            _dx(pd + 2 * sd, dfinal, r + 2 - L, n, rest, at, mask, k0, k1, k2, k3, e2, e1, e0, d1, W, HAS_DFINAL)
    if NEED_W:
        part += it.to(tl.int64) * (W + 1) * D + cols
        tl.store(part + (W - 1) * D, g0, mask=mask)
        if W > 1:
            tl.store(part + (W - 2) * D, g1, mask=mask)
        if W > 2:
            tl.store(part + (W - 3) * D, g2, mask=mask)
        if W > 3:
            tl.store(part + (W - 4) * D, g3, mask=mask)
        if HAS_BIAS:
            tl.store(part + W * D, gb, mask=mask)


@triton.jit(do_not_specialize=["M", "D"])
def conv_weight_grad(part, dw, db, M, D, W: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Sum ``part`` over its `M` chunks, always in the same order."""
    ND = (D + BD - 1) // BD
    pid = tl.program_id(0)
    j = pid // ND
    cols = (pid % ND) * BD + tl.arange(0, BD)
    mask = cols < D
    rows = tl.arange(0, BM)
    total = tl.zeros((BM, BD), tl.float32)
    for m in range(0, M, BM):
        at = ((m + rows).to(tl.int64) * (W + 1) + j)[:, None] * D + cols[None, :]
        total += tl.load(part + at, mask=(m + rows < M)[:, None] & mask[None, :], other=0.0)
    g = tl.sum(total, 0)
    tl.store(dw + cols * W + j, g.to(dw.dtype.element_ty), mask=mask & (j < W))
    if HAS_BIAS:
        tl.store(db + cols, g.to(db.dtype.element_ty), mask=mask & (j == W))


@triton.jit
def _bounds(cu, seq, T, VARLEN: tl.constexpr):
    if VARLEN:
        bos = tl.minimum(tl.maximum(tl.load(cu + seq).to(tl.int32), 0), T)
        length = tl.maximum(tl.minimum(tl.load(cu + seq + 1).to(tl.int32), T) - bos, 0)
        b = 0
    else:
        bos = 0
        length = T
        b = seq
    return b, bos, length


@triton.jit
def _input(x, state, t, st, at, cols, mask, length, W: tl.constexpr, HAS_STATE: tl.constexpr):
    """Input of row ``t`` of a sequence, counted on into what was carried into it."""
    v = tl.load(x + t * st + cols, mask=mask & (t >= 0) & (t < length), other=0.0).to(tl.float32)
    if HAS_STATE:
        v += tl.load(state + at + (W + t), mask=mask & (t < 0) & (W + t >= 0), other=0.0).to(tl.float32)
    return v


@triton.jit(do_not_specialize=["T", "D", "xb", "xt"])
def conv_final(x, state, final, cu, T, D, xb, xt, W: tl.constexpr, BD: tl.constexpr, HAS_STATE: tl.constexpr,
               VARLEN: tl.constexpr):  # fmt: skip
    """The last `W` inputs of every sequence."""
    ND = (D + BD - 1) // BD
    pid = tl.program_id(0)
    seq = pid // ND
    cols = (pid % ND) * BD + tl.arange(0, BD)
    mask = cols < D
    b, bos, length = _bounds(cu, seq, T, VARLEN)
    st = xt.to(tl.int64)
    x += (b + tl.zeros((), tl.int64)) * xb + bos * st
    at = (seq.to(tl.int64) * D + cols) * W
    for w in tl.static_range(W):
        v = _input(x, state, length - W + w, st, at, cols, mask, length, W, HAS_STATE)
        tl.store(final + at + w, v.to(final.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "D", "xb", "xt", "yb", "yt"])
def conv_state_grad(
    x, weight, bias, state, dy, dfinal, dstate, cu, T, D, xb, xt, yb, yt, W: tl.constexpr, BD: tl.constexpr,
    SILU: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DFINAL: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Gradient of what was carried into every sequence: from its first rows, and from the state it hands on."""
    ND = (D + BD - 1) // BD
    pid = tl.program_id(0)
    seq = pid // ND
    cols = (pid % ND) * BD + tl.arange(0, BD)
    mask = cols < D
    b, bos, length = _bounds(cu, seq, T, VARLEN)
    st = xt.to(tl.int64)
    sy = yt.to(tl.int64)
    b64 = b + tl.zeros((), tl.int64)
    x += b64 * xb + bos * st
    dy += b64 * yb + bos * sy
    at = (seq.to(tl.int64) * D + cols) * W
    for w in tl.static_range(W):
        g = tl.zeros((BD,), tl.float32)
        for t in tl.static_range(w):
            e = tl.load(dy + t * sy + cols, mask=mask & (t < length), other=0.0).to(tl.float32)
            if SILU:
                p = tl.zeros((BD,), tl.float32)
                if HAS_BIAS:
                    p += tl.load(bias + cols, mask=mask, other=0.0).to(tl.float32)
                for j in tl.static_range(W):
                    k = tl.load(weight + cols * W + j, mask=mask, other=0.0).to(tl.float32)
                    p += k * _input(x, state, t - W + 1 + j, st, at, cols, mask, length, W, True)
                e = _slope(e, p, True)
            k = tl.load(weight + cols * W + (w - 1 - t), mask=mask, other=0.0).to(tl.float32)
            g += k * e
        if HAS_DFINAL:
            g += tl.load(dfinal + at + (w - length), mask=mask & (w >= length), other=0.0).to(tl.float32)
        tl.store(dstate + at + w, g.to(dstate.dtype.element_ty), mask=mask)


@triton.jit
def _update(x, cache, residual, weight, bias, y, D, xn, rn, seq, part, W: tl.constexpr, BD: tl.constexpr,
            SILU: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RES: tl.constexpr):  # fmt: skip
    """One token of sequence ``seq`` in ``BD`` channels. A channel's slots are shifted by the thread that read them."""
    seq = seq.to(tl.int64)
    cols = part * BD + tl.arange(0, BD)
    mask = cols < D
    at = cache + (seq * D + cols) * W
    p = tl.zeros((BD,), tl.float32)
    if HAS_BIAS:
        p += tl.load(bias + cols, mask=mask, other=0.0).to(tl.float32)
    for w in tl.static_range(W - 1):
        v = tl.load(at + w + 1, mask=mask, other=0.0)
        p += v.to(tl.float32) * tl.load(weight + cols * W + w, mask=mask, other=0.0).to(tl.float32)
        tl.store(at + w, v, mask=mask)
    v = tl.load(x + seq * xn + cols, mask=mask, other=0.0).to(cache.dtype.element_ty)
    p += v.to(tl.float32) * tl.load(weight + cols * W + (W - 1), mask=mask, other=0.0).to(tl.float32)
    tl.store(at + (W - 1), v, mask=mask)
    if SILU:
        p = p * _sigmoid(p)
    if HAS_RES:
        p += tl.load(residual + seq * rn + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + seq * D + cols, p.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["D", "xn", "rn"])
def conv_update(x, cache, residual, weight, bias, y, D, xn, rn, W: tl.constexpr, BD: tl.constexpr,
                SILU: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RES: tl.constexpr):  # fmt: skip
    """One token a sequence."""
    ND = (D + BD - 1) // BD
    pid = tl.program_id(0)
    _update(x, cache, residual, weight, bias, y, D, xn, rn, pid // ND, pid % ND, W, BD, SILU, HAS_BIAS, HAS_RES)


@triton.jit(do_not_specialize=["DQ", "DK", "DV", "qn", "kn", "vn"])
def conv_updates(q, k, v, q_cache, k_cache, v_cache, q_weight, k_weight, v_weight, q_bias, k_bias, v_bias, yq, yk, yv,
                 DQ, DK, DV, qn, kn, vn, W: tl.constexpr, BD: tl.constexpr, SILU: tl.constexpr,
                 HAS_BIAS: tl.constexpr):  # fmt: skip
    """One token a sequence in three convolutions."""
    NQ, NK, NV = (DQ + BD - 1) // BD, (DK + BD - 1) // BD, (DV + BD - 1) // BD
    pid = tl.program_id(0)
    seq, part = pid // (NQ + NK + NV), pid % (NQ + NK + NV)
    if part < NQ:
        _update(q, q_cache, q, q_weight, q_bias, yq, DQ, qn, 0, seq, part, W, BD, SILU, HAS_BIAS, False)
    elif part < NQ + NK:
        _update(k, k_cache, k, k_weight, k_bias, yk, DK, kn, 0, seq, part - NQ, W, BD, SILU, HAS_BIAS, False)
    else:
        _update(v, v_cache, v, v_weight, v_bias, yv, DV, vn, 0, seq, part - NQ - NK, W, BD, SILU, HAS_BIAS, False)
