# SPDX-License-Identifier: MIT
# mypy: ignore-errors
"""The token shift kernel: each row's neighbour minus the row."""

import triton
import triton.language as tl

from fla.ops._common.bisect import sequence_of


@triton.jit(do_not_specialize=["tokens", "T", "N", "steps"])
def shift_kernel(
    x, edge, cu, y, out, tokens, T, N, steps,
    D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """The neighbour is the token before, or, ``BACK``, after. At the end of a sequence it is ``edge`` (None: 0); the
    token at the other end goes to ``out``. ``tokens`` counts those of all rows, ``T`` those of one."""
    BLOCKS: tl.constexpr = (D + BD - 1) // BD
    pid = tl.program_id(0)
    token = (pid // BLOCKS) * BT + tl.arange(0, BT)
    cols = (pid % BLOCKS) * BD + tl.arange(0, BD)
    live = token < tokens
    channels = (cols < D)[None, :]
    if cu is not None:
        seq, start, end = sequence_of(cu, tl.minimum(token, tokens - 1), T, N, steps)
    else:
        seq = token // T
        start = seq * T
        end = start + T
    if BACK:
        near = token == end - 1
        far = token == start
        neighbour = token + 1
    else:
        near = token == start
        far = token == end - 1
        neighbour = token - 1
    here = token.to(tl.int64)[:, None] * D + cols[None, :]
    there = neighbour.to(tl.int64)[:, None] * D + cols[None, :]
    inner = (live & (neighbour >= start) & (neighbour < end))[:, None] & channels
    mask = live[:, None] & channels
    row = seq.to(tl.int64)[:, None] * D + cols[None, :]
    value = tl.load(x + here, mask=mask, other=0.0)
    beside = tl.load(x + there, mask=inner, other=0.0).to(tl.float32)
    if edge is not None:
        # Added, not selected: one of the two is zero.
        beside += tl.load(edge + row, mask=(live & near)[:, None] & channels, other=0.0).to(tl.float32)
    tl.store(y + here, (beside - value.to(tl.float32)).to(y.dtype.element_ty), mask=mask)
    if out is not None:
        tl.store(out + row, value.to(out.dtype.element_ty), mask=(live & far)[:, None] & channels)
