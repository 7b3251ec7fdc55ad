# SPDX-License-Identifier: MIT
"""What the kernels of the delta engine share: tile access (see `fla.ops._common.tiles`), and who runs on keys of which
length.

float16 holds neither the inverse nor the states of keys that are longer than unit vectors. Where the op does not norm
the keys, both a 16-bit and a float32 form of each kernel are launched (PART 1 and 2). `mark_long` tells them on the
device which of the two runs; the other returns at once.
"""

import triton
import triton.language as tl

from fla.ops._common.tiles import load_rows, load_tile, state_offsets, store_rows, store_tile

__all__ = ["any_long", "idle", "load_rows", "load_tile", "long_keys", "state_offsets", "store_rows", "store_tile"]

# Squared length that a unit vector may have after rounding, and how far the state may then be driven past its goal.
UNIT = tl.constexpr(1.02)


@triton.jit
def long_keys(norm2, beta, ok):
    """Whether a token's key is longer than a unit vector, or its erasing does not contract: 1 or 0 for a chunk."""
    return tl.max((ok & ((norm2 > UNIT) | (tl.abs(beta) * norm2 > 2.0 * UNIT))).to(tl.int32), 0)


@triton.jit
def idle(long, PART: tl.constexpr):
    """Whether the other form of a kernel does the work. ``long``: what `any_long` found."""
    if PART == 1:
        return tl.load(long) != 0
    else:
        return tl.load(long) == 0


@triton.jit(do_not_specialize=["n"])
def any_long(marks, long, n, BLOCK: tl.constexpr):
    """Whether any of ``n`` marks is set."""
    found = tl.zeros((BLOCK,), tl.int32)
    for i in range(0, n, BLOCK):
        at = i + tl.arange(0, BLOCK)
        found = tl.maximum(found, tl.load(marks + at, mask=at < n, other=0))
    tl.store(long, tl.max(found, 0))
