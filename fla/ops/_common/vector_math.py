# SPDX-License-Identifier: MIT
# mypy: ignore-errors
"""Device helpers of the kernels with a decay per channel: exponentials, operand casts, tiles of row-major matrices.

All exponents are base 2. Sums over tokens are products with 0/1 matrices: they stay in the accumulator layout, so no
scan and no layout change is needed, and a sum of a token range never comes from a difference of two large sums.
"""

import os

import triton
import triton.language as tl

from fla.ops._common.kernels import LOG2E

INTERPRET = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


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
def lg2(x):
    if INTERPRET:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def fetch(p):
    """Have the lines at these addresses brought into the L2 cache."""
    if not INTERPRET:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [p.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
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
