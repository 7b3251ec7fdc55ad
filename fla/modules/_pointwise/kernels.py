# SPDX-License-Identifier: MIT
# mypy: ignore-errors
"""Kernels of the elementwise engine. ``OP`` selects the function of ``x`` whose value and slope both are computed, in
fp32; gated forms multiply the value by ``y``."""

import triton
import triton.language as tl

SIGMOID, SWISH, LOGSIGMOID, ELU_P1, SQRELU, GELU, POWER = (tl.constexpr(i) for i in range(7))
TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def value_and_slope(x, param, OP: tl.constexpr, SLOPE: tl.constexpr):
    """``f(x)`` and ``f'(x)`` (the value again, unless ``SLOPE``)."""
    slope = x
    if OP == SIGMOID:
        value = tl.sigmoid(x)
        if SLOPE:
            slope = value * (1.0 - value)
    elif OP == SWISH:
        sig = tl.sigmoid(x)
        value = x * sig
        if SLOPE:
            slope = sig * (1.0 + x * (1.0 - sig))
    elif OP == LOGSIGMOID:
        # ``log(1 + e)`` for small e: what rounding 1 + e loses is put right by the quotient.
        e = tl.exp(-tl.abs(x))
        one = 1.0 + e
        log1p = tl.where(one == 1.0, e, tl.log(one) * (e / tl.where(one == 1.0, 1.0, one - 1.0)))
        value = (tl.minimum(x, 0.0) - log1p) / param
        if SLOPE:
            slope = tl.sigmoid(-x) / param
    elif OP == ELU_P1:
        # Squared at the end, so that results below the smallest normal number are not flushed to zero.
        half = tl.exp(0.5 * tl.minimum(x, 0.0))
        value = tl.where(x >= 0.0, x + 1.0, half * half)
        slope = half * half
    elif OP == SQRELU:
        positive = tl.maximum(x, 0.0)
        value = positive * positive
        slope = 2.0 * positive
    elif OP == GELU:
        # ``(1 + tanh(u)) / 2 = sigmoid(2 u)``
        sig = tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
        value = x * sig
        if SLOPE:
            slope = sig * (1.0 + x * (1.0 - sig) * (1.5957691216057308 * (1.0 + 0.134145 * x * x)))
    else:
        sig = tl.sigmoid(x)
        base = tl.maximum(x, TINY)
        root = tl.sqrt(base)
        log = tl.log(base)
        power = param / (root + 1.0)
        value = tl.where(x > 0.0, tl.exp(power * log), x) * sig
        if SLOPE:
            # Quotients by x and its root go into the exponents, where they cannot overflow.
            above = (
                power * tl.exp((power - 1.0) * log)
                - param * log / (2.0 * (root + 1.0) * (root + 1.0)) * tl.exp((power - 0.5) * log)
                + tl.exp(power * log) * (1.0 - sig)
            )
            slope = tl.where(x > 0.0, above, 1.0 + x * (1.0 - sig)) * sig
    return value, slope


@triton.jit
def place(i, D: tl.constexpr, STRIDE: tl.constexpr):
    """Where element ``i`` lies in rows of ``D`` elements that are ``STRIDE`` apart; ``STRIDE`` 0: one after another."""
    if STRIDE == 0:
        return i
    else:
        return (i // D) * STRIDE + i % D


@triton.jit
def span(n, BLOCK: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr):
    """Elements of a program, and which of them exist. ``EVEN``: ``n`` counts 16 elements each, so that whole vectors
    are inside or outside."""
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        n = n * 16
    return i, i < n


@triton.jit(do_not_specialize=["n", "param"])
def pointwise_fwd_kernel(
    x, y, z, n, param,
    OP: tl.constexpr, D: tl.constexpr, SX: tl.constexpr, SY: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    i, live = span(n, BLOCK, WIDE, EVEN)
    value, _ = value_and_slope(tl.load(x + place(i, D, SX), mask=live, other=0.0).to(tl.float32), param, OP, False)
    if y is not None:
        value *= tl.load(y + place(i, D, SY), mask=live, other=0.0).to(tl.float32)
    tl.store(z + i, value.to(z.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["n", "param"])
def pointwise_bwd_kernel(
    x, y, dz, dx, dy, z, n, param,
    OP: tl.constexpr, D: tl.constexpr, SX: tl.constexpr, SY: tl.constexpr, SG: tl.constexpr, AGAIN: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """``AGAIN`` writes the forward's result once more."""
    i, live = span(n, BLOCK, WIDE, EVEN)
    value, slope = value_and_slope(tl.load(x + place(i, D, SX), mask=live, other=0.0).to(tl.float32), param, OP, True)
    grad = tl.load(dz + place(i, D, SG), mask=live, other=0.0).to(tl.float32)
    if y is not None:
        other = tl.load(y + place(i, D, SY), mask=live, other=0.0).to(tl.float32)
        tl.store(dy + i, (grad * value).to(dy.dtype.element_ty), mask=live)
        slope *= other
        value *= other
    if AGAIN:
        tl.store(z + i, value.to(z.dtype.element_ty), mask=live)
    tl.store(dx + i, (grad * slope).to(dx.dtype.element_ty), mask=live)
