# SPDX-License-Identifier: MIT
# mypy: ignore-errors
"""Device code that finds the sequence of a token."""

import triton
import triton.language as tl


@triton.jit
def sequence_of(cu, token, T, N, steps):
    """Number, first row and end of the packed sequence that each of ``token`` belongs to, by bisection.

    ``steps`` halvings find one of ``N`` sequences. Bounds outside `[0, T]` are cut.
    """
    low = tl.zeros_like(token)
    high = low + N
    for _ in range(steps):
        middle = (low + high) // 2
        inside = middle > low
        after = inside & (tl.load(cu + middle, mask=inside, other=0).to(tl.int32) <= token)
        low = tl.where(after, middle, low)
        high = tl.where(after, high, middle)
    start = tl.minimum(tl.maximum(tl.load(cu + low).to(tl.int32), 0), T)
    end = tl.minimum(tl.maximum(tl.load(cu + low + 1).to(tl.int32), 0), T)
    return low, start, end
