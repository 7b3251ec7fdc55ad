# SPDX-License-Identifier: MIT
"""What the kernels of the delta engine share: tile access (see `fla.ops._common.tiles`), and who works on what float16
has no room for.

float16 ends at 65504, and below 2^-14 it loses digits. Of float16 calls both a 16-bit and a float32 form of each
kernel are launched (PART 1 and 2): all of a pass in the one form, then all in the other. The 16-bit form watches what
it does and says in ``long`` whether its results are good. If they are, the other form returns at once, and if not, it
does the pass again.

Words of ``long``: 0: keys are too long, the inverse is too large, or something left the range; 1: all outputs of some
program are near zero, 2: those of another are not; 3 and 4: the same of gradients. What left the range needs no search:
it is inf or NaN in a product, and so is everything that follows from it.
"""

import triton
import triton.language as tl

from fla.ops._common.tiles import load_rows, load_tile, state_offsets, store_rows, store_tile

__all__ = [
    "any_long", "doubt", "idle", "judge", "large", "load_rows", "load_tile", "long_keys", "parallel", "state_offsets",
    "store_rows", "store_tile", "watch",
]  # fmt: skip


# Squared length that a unit vector may have after rounding, and how far the state may then be driven past its goal.
UNIT = tl.constexpr(1.02)
# Largest sum of magnitudes in a row of the inverse, by which rounding errors grow; and, a token, in a row of what is
# inverted: above it keys are nearly parallel and erase more than there is.
ROW_SUM = tl.constexpr(17.0)
PARALLEL = tl.constexpr(1.2)
# Energy of 64 values near 2^-18, below which results have too few digits left.
NEAR_ZERO = tl.constexpr(2.0**-31)
# Write strength from which on dividing by it costs no digits.
SURE = tl.constexpr(2.0**-6)


@triton.jit
def long_keys(norm2, beta, ok):
    """Which tokens' keys are longer than a unit vector, or do not contract when they erase."""
    return ok & ((norm2 > UNIT) | (tl.abs(beta) * norm2 > 2.0 * UNIT))


@triton.jit
def parallel(L, C: tl.constexpr):
    """Of which of C tokens the keys before are so nearly parallel that rounding would show in the inverse of
    ``I + L``. NaN counts."""
    return ~(tl.sum(tl.abs(L), 1) < PARALLEL * C)


@triton.jit
def large(X):
    """In which rows of that inverse float16's rounding would show. NaN counts."""
    return ~(tl.sum(tl.abs(X), 1) < ROW_SUM)


@triton.jit
def idle(long, PART: tl.constexpr):
    """Whether the other form of a kernel does the work."""
    if PART == 1:
        return tl.load(long) != 0
    else:
        out = (tl.load(long + 1) != 0) & (tl.load(long + 2) == 0)
        grad = (tl.load(long + 3) != 0) & (tl.load(long + 4) == 0)
        return (tl.load(long) == 0) & ~out & ~grad


@triton.jit
def watch(top, x):
    """The largest energy [rows] of the tiles ``x`` [rows, columns] so far; not finite once one was not."""
    return tl.maximum(top, tl.sum(x * x, 1), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def doubt(long, x):
    """Say so where ``x`` [n] is not finite."""
    bad = tl.max((~(tl.abs(x) < float("inf"))).to(tl.int32), 0)
    tl.store(long, 1, mask=bad != 0)


@triton.jit
def judge(long, top, S, WORD: tl.constexpr):
    """What a pass says at its end of what it has watched and of its last state; ``WORD`` is 1 or 3."""
    bad = tl.max((~(tl.abs(tl.sum(S, 1)) + top < float("inf"))).to(tl.int32), 0)
    most = tl.max(top, 0)
    at = tl.where(bad != 0, 0, tl.where(most < NEAR_ZERO, WORD, WORD + 1))
    tl.store(long + at, 1, mask=(bad != 0) | (most > 0.0))


@triton.jit(do_not_specialize=["n"])
def any_long(marks, long, n, BLOCK: tl.constexpr):
    """Word 0 of ``long``: whether any of ``n`` marks is set; the others: nothing is known yet."""
    found = tl.zeros((BLOCK,), tl.int32)
    for i in range(0, n, BLOCK):
        at = i + tl.arange(0, BLOCK)
        found = tl.maximum(found, tl.load(marks + at, mask=at < n, other=0))
    i = tl.arange(0, 8)
    tl.store(long + i, tl.where(i == 0, tl.max(found, 0), 0))
