# SPDX-License-Identifier: MIT
# mypy: ignore-errors
"""Softmax losses of rows of logits, one program a row.

A tile is ``[R, C]`` with consecutive classes along `C`, which spans all threads: sums and maxima over `R` stay inside a
thread, and the threads meet once a row. Exponentials are powers of two, logits scaled to match.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))


@triton.jit
def _bits(x, scale, cap, CAP: tl.constexpr):
    """Transformed logits in units of ln 2."""
    if CAP:
        z = cap * _tanh(x * (scale / cap)) * LOG2E
    else:
        z = x * (scale * LOG2E)
    return z


@triton.jit
def _online(m, s, z):
    """Running maximum and sum of powers of every column, with a tile more."""
    top = tl.maximum(m, tl.max(z, 0))
    # Where everything was -inf so far, any finite reference gives sums of zero.
    at = tl.where(top == float("-inf"), 0.0, top)
    return top, s * tl.exp2(m - at) + tl.sum(tl.exp2(z - at[None, :]), 0)


@triton.jit
def _finish(m, s):
    top = tl.max(m, 0)
    at = tl.where(top == float("-inf"), 0.0, top)
    return at + tl.log2(tl.sum(s * tl.exp2(m - at), 0))


@triton.jit
def _peak(x, best, where, col, C: tl.constexpr):
    """Largest raw logit of every column and the first class that has it."""
    top, r = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    better = top > best
    return tl.where(better, top, best), tl.where(better, col + r * C, where)


@triton.jit
def _slope(x, z, hot, lse, d, scale, cap, smooth, tilt, keep, CAP: tl.constexpr):
    """Gradient of a row's loss for its logits; ``hot`` marks the target."""
    g = tl.exp2(z - lse) * tilt - smooth
    g = tl.where(hot, g - keep, g) * d
    if CAP:
        t = z / (cap * LOG2E)
        g *= 1.0 - t * t
    return g


@triton.jit(do_not_specialize=["VU", "row_stride", "grad_stride", "d_stride", "total", "first", "ignore"])
def cross_entropy_rows(
    logits, target, loss, z_loss, lse, dloss, grad, VU, row_stride, grad_stride, d_stride, total, first, ignore, scale,
    cap, smoothing, lse_scale, warp, VEC: tl.constexpr, VV: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    LOSS: tl.constexpr, GRAD: tl.constexpr, PARTS: tl.constexpr, CAP: tl.constexpr, SMOOTH: tl.constexpr,
    WARP: tl.constexpr,
):  # fmt: skip
    """LOSS writes ``loss``, ``z_loss`` and ``lse``; GRAD writes ``grad``, from ``lse`` if LOSS did not just find it.

    PARTS: the classes are shared by ranks, ``loss`` gets this rank's part of what the loss subtracts from ``lse``.
    WARP: add ``warp * max(logits)`` to the gradient of the largest logit. ``grad`` may be ``logits``. Strides come in
    units of VEC elements and `V` in units of VV, which tells the compiler how wide it may load.
    """
    row = tl.program_id(0).to(tl.int64)
    V = VU * VV
    logits += row * row_stride * VEC
    grad += row * grad_stride * VEC
    t = tl.load(target + row)
    ignored = t == ignore
    local = (t - first).to(tl.int32)
    mine = (t >= first) & (t < first + V) & (ignored == 0)
    c = tl.arange(0, C)
    at = tl.arange(0, R)[:, None] * C + c[None, :]
    full = V // (R * C) * (R * C)
    best = tl.full((C,), float("-inf"), tl.float32)
    where = tl.zeros((C,), tl.int32)
    column = -1
    top = 0.0
    bits = 0.0
    if LOSS:
        # A row that costs nothing need not be read when its gradient, zero, is written right away.
        end = full
        stop = V
        if GRAD and not WARP:
            end = tl.where(ignored, 0, full)
            stop = tl.where(ignored, 0, V)
        m = tl.full((C,), float("-inf"), tl.float32)
        s = tl.zeros((C,), tl.float32)
        zs = tl.zeros((C,), tl.float32)
        for v in range(0, end, R * C):
            x = tl.load(logits + v + at).to(tl.float32)
            z = _bits(x, scale, cap, CAP)
            m, s = _online(m, s, z)
            if SMOOTH:
                zs += tl.sum(z, 0)
            if WARP:
                best, where = _peak(x, best, where, v + c, C)
        if end < stop:
            ok = end + at < V
            x = tl.load(logits + end + at, mask=ok, other=float("-inf")).to(tl.float32)
            z = tl.where(ok, _bits(x, scale, cap, CAP), float("-inf"))
            m, s = _online(m, s, z)
            if SMOOTH:
                zs += tl.sum(tl.where(ok, z, 0.0), 0)
            if WARP:
                best, where = _peak(x, best, where, end + c, C)
        bits = _finish(m, s)
        picked = _bits(tl.load(logits + local, mask=mine, other=0.0).to(tl.float32), scale, cap, CAP)
        reward = tl.where(mine, picked, 0.0)
        if SMOOTH:
            reward = (1.0 - smoothing) * reward + smoothing / total * tl.sum(zs, 0)
        natural = bits * LN2
        tl.store(lse + row, natural)
        if PARTS:
            tl.store(loss + row, reward * LN2)
        else:
            extra = tl.where(ignored, 0.0, lse_scale * natural * natural)
            tl.store(z_loss + row, extra)
            tl.store(loss + row, tl.where(ignored, 0.0, (bits - reward) * LN2 + extra))
        if WARP:
            top = tl.max(best, 0)
            column = tl.min(tl.where(best == top, where, V), 0)
    if GRAD:
        if not LOSS:
            bits = tl.load(lse + row) * LOG2E
        d = tl.load(dloss + row * d_stride).to(tl.float32) * scale
        smooth = smoothing / total
        tilt = 1.0 + 2.0 * lse_scale * bits * LN2
        keep = 1.0 - smoothing
        local = tl.where(mine, local, -1)
        if LOSS:
            # Threads read each other's logits above and write over them below.
            tl.debug_barrier()
        if ignored:
            for v in range(0, V, R * C):
                g = tl.zeros((R, C), tl.float32)
                if WARP:
                    g = tl.where(v + at == column, top * warp, g)
                tl.store(grad + v + at, g.to(grad.dtype.element_ty), mask=v + at < V)
        else:
            for v in range(0, full, R * C):
                x = tl.load(logits + v + at).to(tl.float32)
                z = _bits(x, scale, cap, CAP)
                g = _slope(x, z, v + at == local, bits, d, scale, cap, smooth, tilt, keep, CAP)
                if WARP:
                    g = tl.where(v + at == column, g + top * warp, g)
                tl.store(grad + v + at, g.to(grad.dtype.element_ty))
            if full < V:
                ok = full + at < V
                x = tl.load(logits + full + at, mask=ok, other=0.0).to(tl.float32)
                z = _bits(x, scale, cap, CAP)
                g = _slope(x, z, full + at == local, bits, d, scale, cap, smooth, tilt, keep, CAP)
                if WARP:
                    g = tl.where(full + at == column, g + top * warp, g)
                tl.store(grad + full + at, g.to(grad.dtype.element_ty), mask=ok)


@triton.jit
def _distance(a, mt, s, t):
    """Running sum of ``2**t (t - s)`` of every column, relative to ``2**mt``; a class ruled out adds nothing."""
    top = tl.maximum(mt, tl.max(t, 0))
    at = tl.where(top == float("-inf"), 0.0, top)
    far = tl.where(t == float("-inf"), 0.0, t - s)
    return a * tl.exp2(mt - at) + tl.sum(tl.exp2(t - at[None, :]) * far, 0)


@triton.jit(do_not_specialize=["VU", "s_stride", "t_stride"])
def divergence_rows(
    student, teacher, loss, VU, s_stride, t_stride, scale, VEC: tl.constexpr, VV: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, GRAD: tl.constexpr,
):  # fmt: skip
    """``KL(softmax(teacher) || softmax(student))`` of a row; GRAD writes ``scale`` times its gradient over student."""
    row = tl.program_id(0).to(tl.int64)
    V = VU * VV
    student += row * s_stride * VEC
    teacher += row * t_stride * VEC
    at = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    ms = tl.full((C,), float("-inf"), tl.float32)
    mt = tl.full((C,), float("-inf"), tl.float32)
    ss = tl.zeros((C,), tl.float32)
    st = tl.zeros((C,), tl.float32)
    a = tl.zeros((C,), tl.float32)
    for v in range(0, V, R * C):
        ok = v + at < V
        s = tl.load(student + v + at, mask=ok, other=float("-inf")).to(tl.float32) * LOG2E
        t = tl.load(teacher + v + at, mask=ok, other=float("-inf")).to(tl.float32) * LOG2E
        a = _distance(a, mt, s, t)
        ms, ss = _online(ms, ss, s)
        mt, st = _online(mt, st, t)
    ls = _finish(ms, ss)
    lt = _finish(mt, st)
    top = tl.max(mt, 0)
    far = tl.sum(a * tl.exp2(mt - top), 0) / tl.sum(st * tl.exp2(mt - top), 0)
    tl.store(loss + row, (far - lt + ls) * LN2)
    if GRAD:
        tl.debug_barrier()
        for v in range(0, V, R * C):
            ok = v + at < V
            s = tl.load(student + v + at, mask=ok, other=0.0).to(tl.float32) * LOG2E
            t = tl.load(teacher + v + at, mask=ok, other=0.0).to(tl.float32) * LOG2E
            g = (tl.exp2(s - ls) - tl.exp2(t - lt)) * scale
            tl.store(student + v + at, g.to(student.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["N"])
def scale_unless_one(x, by, N, BLOCK: tl.constexpr, LONG: tl.constexpr):
    """``x *= by`` for a factor on the device; nothing is read when it is one, as in ``loss.backward()``.

    LONG tells launches whose `N` is an int64 apart.
    """
    factor = tl.load(by).to(tl.float32)
    if factor != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        v = tl.load(x + at, mask=at < N, other=0.0).to(tl.float32) * factor
        tl.store(x + at, v.to(x.dtype.element_ty), mask=at < N)
