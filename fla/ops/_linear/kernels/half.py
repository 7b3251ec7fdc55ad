# SPDX-License-Identifier: MIT
# mypy: ignore-errors
"""fp32 tiles as operands of float16 products, which end at 65504 and lose bits below 2^-14.

A row, a column or a tile is divided by a power of two, by which the product is multiplied, so that its largest element
is near 2^14: nothing overflows, and only what is many orders of magnitude below the rest is lost. In other dtypes
nothing of this is compiled.
"""

import triton
import triton.language as tl


@triton.jit
def power(m):
    """The power of two that brings ``m`` to 2^14 .. 2^15, and its inverse; small ones are bounded, and 0 has one."""
    e = tl.maximum((m.to(tl.int32, bitcast=True) >> 23) - (127 + 14), -60)
    return ((127 + e) << 23).to(tl.float32, bitcast=True), ((127 - e) << 23).to(tl.float32, bitcast=True)


@triton.jit
def fit_rows(x, DT: tl.constexpr):
    """``x`` as operand, its factors, one a row, and their inverses."""
    if tl.float16 == DT:
        f, inverse = power(tl.max(tl.abs(x), 1))
        return (x * inverse[:, None]).to(DT), f, inverse
    else:
        return x.to(DT), 1.0, 1.0


@triton.jit
def fit_columns(x, DT: tl.constexpr):
    """``x`` as operand, its factors, one a column, and their inverses."""
    if tl.float16 == DT:
        f, inverse = power(tl.max(tl.abs(x), 0))
        return (x * inverse[None, :]).to(DT), f, inverse
    else:
        return x.to(DT), 1.0, 1.0


@triton.jit
def fit_tile(x, DT: tl.constexpr):
    """``x`` as operand, its factor and the inverse of that."""
    if tl.float16 == DT:
        f, inverse = power(tl.max(tl.max(tl.abs(x), 1), 0))
        return (x * inverse).to(DT), f, inverse
    else:
        return x.to(DT), 1.0, 1.0


@triton.jit
def lift_of(b, DT: tl.constexpr):
    """The exponent by which what decays by ``b`` (base 2) at least comes near to 1; 0 where nothing needs it."""
    if tl.float16 == DT:
        return tl.minimum(tl.floor(tl.max(b, 0) * -1.0), 60.0)
    else:
        return 0.0


@triton.jit
def keep_factors(factors, f, tile, v0, k0, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Store the factors of the rows of a block [BV, BK] of state number ``tile``; see `with_factors`."""
    NK: tl.constexpr = (K + BK - 1) // BK
    v = v0 + tl.arange(0, BV)
    tl.store(factors + (tile.to(tl.int64) * NK + k0 // BK) * V + v, f, mask=v < V)


@triton.jit
def kept_factors(factors, tile, v0, k0, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    NK: tl.constexpr = (K + BK - 1) // BK
    v = v0 + tl.arange(0, BV)
    return tl.load(factors + (tile.to(tl.int64) * NK + k0 // BK) * V + v, mask=v < V, other=0.0)


@triton.jit
def even_rows(
    x, factors, tile, v0, k0, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr
):  # fmt: skip
    """A block of a kept state with one factor for all rows, and that factor. ``BK``: of the pass that kept it."""
    if tl.float16 == x.dtype:
        f = kept_factors(factors, tile, v0, k0, K, V, BK, BV)
        most = tl.max(f, 0)
        return (x.to(tl.float32) * (f / most)[:, None]).to(tl.float16), most
    else:
        return x, 1.0
