# SPDX-License-Identifier: MIT
"""Device helpers of the vector-decay kernels: gates, 0/1 sums over tokens, tile loads.

All exponents are base 2. Sums over tokens are products with 0/1 matrices: they stay in the accumulator layout, so no
scan and no layout change is needed, and a sum of a token range never comes from a difference of two large sums.
"""

import os

import triton
import triton.language as tl

from fla.ops._common.kernels import LOG2E, softplus

INTERPRET = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
# 32 tokens at -5 nat are 230.8 bits: an anchor 116 bits below a block's start keeps both factors inside bf16's range.
SHIFT = tl.constexpr(116.0)
UNSHIFT = tl.constexpr(2.0**-116)
# A gate promised to stay above -5 nat is cut just below it, so a broken promise stays finite.
BOUND_BITS = tl.constexpr(-7.25)
# The same two cuts for bf16 gates in nat, at values that bf16 holds.
BOUND_NAT = tl.constexpr(-5.03125)
FLOOR_NAT = tl.constexpr(-178.0)
# 2^-256 is 0 in fp32, so a stronger decay need not be told from it; -inf would give NaN in the 0/1 products.
FLOOR_BITS = tl.constexpr(-256.0)


@triton.jit
def ex2(x):
    """``2^x`` without the guard for denormal results."""
    if INTERPRET:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def rcp(x):
    if INTERPRET:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def narrow(x, DT: tl.constexpr):
    """fp32 to an operand type, two at a time: the compiler converts bf16 one by one where it also widens the result."""
    if tl.bfloat16 == DT and not INTERPRET:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return x.to(DT)


@triton.jit
def load_tile(
    x, r0, n, c0, cols, ld, R: tl.constexpr, W: tl.constexpr, TMA: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Tile [R, W] at (r0, c0) of a row-major matrix; rows from ``n`` (ROWS) and columns from ``cols`` (COLS) are 0."""
    rr = tl.arange(0, R)[:, None]
    cc = tl.arange(0, W)[None, :]
    if TMA:
        t = x.load([r0, c0])
        if ROWS and COLS:
            t = tl.where((rr < n) & (cc < cols), t, 0.0)
        elif ROWS:
            t = tl.where((rr < n) & (cc >= 0), t, 0.0)
        elif COLS:
            t = tl.where((cc < cols) & (rr >= 0), t, 0.0)
    else:
        p = x + (r0 + rr).to(tl.int64) * ld + (c0 + cc)
        if ROWS and COLS:
            t = tl.load(p, mask=(rr < n) & (cc < cols), other=0.0)
        elif ROWS:
            t = tl.load(p, mask=(rr < n) & (cc >= 0), other=0.0)
        elif COLS:
            t = tl.load(p, mask=(cc < cols) & (rr >= 0), other=0.0)
        else:
            t = tl.load(p)
    return t


@triton.jit
def store_tile(
    x,
    t,
    r0,
    n,
    c0,
    cols,
    ld,
    R: tl.constexpr,
    W: tl.constexpr,
    TMA: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Counterpart of `load_tile`. A descriptor is used only for tiles without masks."""
    if TMA:
        x.store([r0, c0], t)
    else:
        rr = tl.arange(0, R)[:, None]
        cc = tl.arange(0, W)[None, :]
        p = x + (r0 + rr).to(tl.int64) * ld + (c0 + cc)
        if ROWS and COLS:
            tl.store(p, t, mask=(rr < n) & (cc < cols))
        elif ROWS:
            tl.store(p, t, mask=(rr < n) & (cc >= 0))
        elif COLS:
            tl.store(p, t, mask=(cc < cols) & (rr >= 0))
        else:
            tl.store(p, t)


@triton.jit
def log_decay(x, rate, bias, lower, GATE: tl.constexpr, EXACT: tl.constexpr):
    """Log decay in bits. GATE 0: ``x`` is the natural-log decay; 1: ``-rate softplus(x + bias)``;
    2: ``lower sigmoid(rate (x + bias))``."""
    if GATE == 0:
        y = x * LOG2E
    elif GATE == 1:
        y = softplus(x + bias) * (rate * -LOG2E)
    else:
        y = rcp(1.0 + ex2((x + bias) * (rate * -LOG2E))) * (lower * LOG2E)
    if EXACT:
        y = tl.where(y < FLOOR_BITS, FLOOR_BITS, y)
    elif GATE == 0:
        y = tl.where(y < BOUND_BITS, BOUND_BITS, y)
    return y


@triton.jit
def raw_decay(x, EXACT: tl.constexpr):
    """A bf16 log decay in nat, cut as `log_decay` does: 0/1 products of it are exact, so it is never rounded."""
    if EXACT:
        return tl.where(x < FLOOR_NAT, FLOOR_NAT, x).to(tl.bfloat16)
    else:
        return tl.where(x < BOUND_NAT, BOUND_NAT, x).to(tl.bfloat16)


@triton.jit
def log_decay_grad(dy, x, rate, bias, lower, GATE: tl.constexpr):
    """Gradient through `log_decay` (``dy`` per nat): (of x and bias, of A_log), both per element."""
    if GATE == 0:
        dx = dy
        da = dy * 0.0
    elif GATE == 1:
        z = x + bias
        dx = dy * (-rate) * rcp(1.0 + ex2(z * -LOG2E))
        da = dy * (-rate) * softplus(z)
    else:
        z = x + bias
        s = rcp(1.0 + ex2(z * (rate * -LOG2E)))
        dx = dy * lower * s * (1.0 - s) * rate
        da = dx * z
    return dx, da


@triton.jit
def write_rate(x, BETA: tl.constexpr):
    """beta in fp32. BETA 0: as given; 1: ``sigmoid``; 2: ``2 sigmoid``."""
    y = x.to(tl.float32)
    if BETA > 0:
        y = BETA * rcp(1.0 + ex2(y * -LOG2E))
    return y


@triton.jit
def one_matrix(ones, index, N: tl.constexpr):
    """0/1 matrix ``index`` [N, N] of the constants that `vector_launch.one_matrices` builds."""
    r = tl.arange(0, N)
    return tl.load(ones + index * 4096 + r[:, None] * 64 + r[None, :])


@triton.jit
def token_sum(M, g, PREC: tl.constexpr):
    """0/1 matrix times gates `[tokens, channels]`, in bits: in fp32, rounded to fp16, or bf16 in nat ("raw")."""
    if PREC == "fp16":
        return tl.dot(M, g)
    elif PREC == "raw":
        return tl.dot(M, g) * LOG2E
    else:
        return tl.dot(M, g, input_precision=PREC)


@triton.jit
def split_gates(g, SD: tl.constexpr, RAW: tl.constexpr):
    """Gates as one operand (fp32, or bf16 in nat), or as two bf16 operands whose sum keeps 16 bits."""
    if tl.float32 == SD or RAW:
        return g, g
    else:
        hi = narrow(g, tl.bfloat16)
        return hi, narrow(g - hi.to(tl.float32), tl.bfloat16)


@triton.jit
def gate_sum(hi, lo, M, SD: tl.constexpr, PREC: tl.constexpr, RAW: tl.constexpr):
    """Gates `[channels, tokens]`, as `split_gates` made them, times a 0/1 matrix; in bits."""
    if RAW:
        return tl.dot(hi, M) * LOG2E
    elif tl.float32 == SD:
        return tl.dot(hi, M, input_precision=PREC)
    else:
        return tl.dot(lo, M, tl.dot(hi, M))


@triton.jit
def grad_sum(h, M, SD: tl.constexpr, PREC: tl.constexpr, SPLIT: tl.constexpr):
    """Gradients `[channels, tokens]` times a 0/1 matrix. 16-bit: bf16 for its range, in two parts where large terms
    cancel (SPLIT)."""
    if tl.float32 == SD:
        return tl.dot(h, M, input_precision=PREC)
    else:
        hi = narrow(h, tl.bfloat16)
        y = tl.dot(hi, M)
        if SPLIT:
            y = tl.dot(narrow(h - hi.to(tl.float32), tl.bfloat16), M, y)
        return y


@triton.jit
def level_pairs(b, N: tl.constexpr):
    """The pairs (row in the second half, column in the first half of the same block) of level ``b``."""
    i = tl.arange(0, N)[:, None]
    j = tl.arange(0, N)[None, :]
    return ((i // (2 * b)) == (j // (2 * b))) & ((i // b) > (j // b))


@triton.jit
def diag32(P):
    """The two 32 x 32 diagonal blocks of [64, 64], as [64, 32]."""
    b = tl.arange(0, 2)
    m = b[:, None, None, None] == b[None, None, :, None]
    return tl.reshape(tl.sum(tl.where(m, tl.reshape(P, (2, 32, 2, 32)), 0.0), axis=2), (64, 32))
