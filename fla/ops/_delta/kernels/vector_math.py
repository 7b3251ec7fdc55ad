# SPDX-License-Identifier: MIT
"""Device helpers of the vector-decay kernels of the delta family; those shared with the linear one are re-exported.

All exponents are base 2. Sums over tokens are products with 0/1 matrices: they stay in the accumulator layout, so no
scan and no layout change is needed, and a sum of a token range never comes from a difference of two large sums.
"""

import triton
import triton.language as tl

from fla.ops._common.kernels import LOG2E
from fla.ops._common.vector_math import (  # noqa: F401
    INTERPRET,
    ex2,
    fetch,
    gate_sum,
    grad_sum,
    level_pairs,
    lg2,
    load_tile,
    narrow,
    rcp,
    split_gates,
    store_tile,
    token_sum,
)

# 32 tokens at -5 nat are 230.8 bits: an anchor 116 bits below a block's start keeps both factors inside bf16's range.
SHIFT = tl.constexpr(116.0)
UNSHIFT = tl.constexpr(2.0**-116)
# What a chunk may lose in a channel for that; and the largest elements of keys and queries.
MILD_BITS = tl.constexpr(-231.0)
MILD_SIZE = tl.constexpr(1024.0)
# A gate promised to stay above -5 nat is cut just below it, so a broken promise stays finite.
BOUND_BITS = tl.constexpr(-7.25)
# The same two cuts for bf16 gates in nat, at values that bf16 holds.
BOUND_NAT = tl.constexpr(-5.03125)
FLOOR_NAT = tl.constexpr(-178.0)
# 2^-256 is 0 in fp32, so a stronger decay need not be told from it; -inf would give NaN in the 0/1 products.
FLOOR_BITS = tl.constexpr(-256.0)


@triton.jit
def softplus_bits(t):
    """``log2(1 + 2^t)``, `softplus` in bits; to 2^-22 absolutely, far below what a decay is rounded to."""
    return tl.where(t > 24.0, t, lg2(1.0 + ex2(tl.minimum(t, 24.0))))


@triton.jit
def log_decay(x, rate, bias, lower, GATE: tl.constexpr, EXACT: tl.constexpr):
    """Log decay in bits. GATE 0: ``x`` is the natural-log decay; 1: ``-rate softplus(x + bias)``;
    2: ``lower sigmoid(rate (x + bias))``."""
    if GATE == 0:
        y = x * LOG2E
    elif GATE == 1:
        y = softplus_bits((x + bias) * LOG2E) * -rate
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
    """Gradient through `log_decay` (``dy`` per nat): (of x and bias, of A_log), both per element.

    From the exponential of the other sign than there: what is the same would be kept from there to here.
    """
    if GATE == 0:
        dx = dy
        da = dy * 0.0
    elif GATE == 1:
        t = (x + bias) * -LOG2E
        u = ex2(tl.minimum(t, 64.0)) + 1.0
        dx = dy * -rate
        da = dx * tl.where(t > 24.0, 0.0, (lg2(u) - t) * (1.0 / LOG2E))
        dx = dx * rcp(u)
    else:
        z = x + bias
        s = rcp(1.0 + ex2(z * (rate * LOG2E)))
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
def strong_gates(total):
    """Of two chunks `[2, channels]` whose gates sum up to ``total``: whether they need the exact form, 1 or 0."""
    return tl.max((total < MILD_BITS).to(tl.int32), 1)


@triton.jit
def too_large(x):
    """1 where any element of a tile leaves the exact form alone to hold it."""
    return tl.max(tl.max((tl.abs(x) > MILD_SIZE).to(tl.int32), 1), 0)


@triton.jit
def one_matrix(ones, index, N: tl.constexpr):
    """0/1 matrix ``index`` [N, N] of the constants that `vector_launch.one_matrices` builds."""
    r = tl.arange(0, N)
    return tl.load(ones + index * 4096 + r[:, None] * 64 + r[None, :])


@triton.jit
def diag32(P):
    """The two 32 x 32 diagonal blocks of [64, 64], as [64, 32]."""
    a, b = tl.split(tl.permute(tl.reshape(P, (64, 2, 32)), (0, 2, 1)))
    return tl.where(tl.arange(0, 64)[:, None] < 32, a, b)


@triton.jit
def unshift(x, DT: tl.constexpr, SD: tl.constexpr):
    """``2^-116 x`` in the dtype of tiles, and ``x`` as operand of the scores. Between bf16 and bf16 the power of two is
    exact, and taken off two at a time."""
    y = x.to(SD)
    if tl.bfloat16 == DT and tl.bfloat16 == SD and not INTERPRET:
        d = tl.inline_asm_elementwise(
            "{ .reg .b32 c, z; mov.b32 c, 0x05800580; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, c, z; }",
            "=r,r",
            [y],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        d = (x * UNSHIFT).to(DT)
    return d, y


@triton.jit
def bounded_decay(x, rate, bias, lower, unit, GATE: tl.constexpr, FREE: tl.constexpr):
    """`log_decay` for gates that are bounded, or (FREE) dealt with elsewhere where not; ``unit``: bits a nat."""
    if GATE == 0:
        y = x * unit
        if FREE:
            return tl.where(y < FLOOR_BITS, FLOOR_BITS, y)
        return tl.where(y < BOUND_BITS, BOUND_BITS, y)
    elif GATE == 1:
        return softplus_bits((x + bias) * unit) * -rate
    else:
        # The bound is taken into the sigmoid's sum: two fused operations.
        steep = rate * -LOG2E
        part = 1.0 / (lower * unit)
        return rcp(ex2(x * steep + bias * steep) * part + part)
