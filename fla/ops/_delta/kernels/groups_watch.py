# SPDX-License-Identifier: MIT
# mypy: ignore-errors
"""Kernels in Gluon say for themselves whether what they did left float16's range: `watch`, `judge` and the words of
``long`` are those of `common`.

A row of the state speaks for itself here, not a program for all its rows, so that no two warps have to meet. Whether
results are good comes out the same: some row was near zero, and none was not.
"""

import triton.language as tl
from triton.experimental import gluon

from fla.ops._common.gluon_language import gl
from fla.ops._delta.kernels import common

NEAR_ZERO = gl.constexpr(common.NEAR_ZERO.value)


@gluon.jit
def watch(top, x):
    """The largest energy [64] of the tiles ``x`` [64, columns] so far; not finite once one was not."""
    return gl.maximum(top, gl.sum(x * x, 1), propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def saturate(x):
    """float16 ends at 65504: what fp32 still holds does not become infinite. NaN sends a call to fp32 anyway."""
    return gl.minimum(gl.maximum(x, -65504.0), 65504.0)


@gluon.jit
def judge(long, top, S, WORD: gl.constexpr, layout: gl.constexpr):
    """What the rows of a group say at its end of what was watched and of their state ``S``, a tile of ``layout``;
    ``WORD`` is 1 or 3."""
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    top = gl.convert_layout(top, rows)
    good = gl.abs(gl.sum(S, 1)) + top < float("inf")
    said = gl.full([64], WORD, gl.int32, rows)
    said = gl.where(top < NEAR_ZERO, said, said + 1)
    said = gl.where(good, said, gl.zeros_like(said))
    gl.store(long + said, gl.full([64], 1, gl.int32, rows), mask=(top > 0.0) | ~good)
