# SPDX-License-Identifier: MIT
# mypy: ignore-errors
"""Kernels behind the helpers: running sums, softmax rows, means of chunks, padding."""

import triton
import triton.language as tl

from fla.ops._common.kernels import chunk_at, sequence_at


@triton.jit(do_not_specialize=["T", "NT"])
def local_sums(
    x, y, table, T, NT, scale, S: tl.constexpr, BS: tl.constexpr, C: tl.constexpr, REVERSE: tl.constexpr,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """Running sums of ``x`` `[rows, S]` inside chunks of C rows, times ``scale``. A program a chunk and block of S."""
    NS: tl.constexpr = (S + BS - 1) // BS
    pid = tl.program_id(0)
    row, n = chunk_at(table, pid // NS, T, NT, C, VARLEN)
    c = (pid % NS) * BS + tl.arange(0, BS)
    rr = tl.arange(0, C)
    at = (row + rr).to(tl.int64)[:, None] * S + c[None, :]
    m = (rr < n)[:, None] & (c < S)[None, :]
    t = tl.cumsum(tl.load(x + at, mask=m, other=0.0).to(tl.float32), 0, reverse=REVERSE)
    tl.store(y + at, (t * scale).to(y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["T"])
def global_sums(
    x, y, cu, T, scale, S: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, REVERSE: tl.constexpr,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """Running sums over whole sequences. One program a sequence and block of S."""
    NS: tl.constexpr = (S + BS - 1) // BS
    pid = tl.program_id(0)
    bos, length, _ = sequence_at(cu, cu, pid // NS, T, 0, VARLEN)
    c = (pid % NS) * BS + tl.arange(0, BS)
    rr = tl.arange(0, BT)
    total = tl.zeros((BS,), tl.float32)
    for t0 in tl.range(0, length, BT, num_stages=1):
        # Suffix sums go from the end, a block at a time.
        r = length - t0 - BT + rr if REVERSE else t0 + rr
        at = (bos + r).to(tl.int64)[:, None] * S + c[None, :]
        m = ((r >= 0) & (r < length))[:, None] & (c < S)[None, :]
        t = tl.load(x + at, mask=m, other=0.0).to(tl.float32)
        tl.store(y + at, ((tl.cumsum(t, 0, reverse=REVERSE) + total[None, :]) * scale).to(y.dtype.element_ty), mask=m)
        total += tl.sum(t, 0)


@triton.jit
def softmax_rows(x, y, D: tl.constexpr, BD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * D
    c = tl.arange(0, BD)
    t = tl.load(x + row + c, mask=c < D, other=-float("inf")).to(tl.float32)
    # Where all is -inf the quotient is NaN, as in PyTorch.
    e = tl.exp(t - tl.max(t, 0))
    tl.store(y + row + c, (e / tl.sum(e, 0)).to(y.dtype.element_ty), mask=c < D)


@triton.jit
def softmax_grad_rows(p, dp, y, D: tl.constexpr, BD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * D
    c = tl.arange(0, BD)
    a = tl.load(p + row + c, mask=c < D, other=0.0).to(tl.float32)
    b = tl.load(dp + row + c, mask=c < D, other=0.0).to(tl.float32)
    tl.store(y + row + c, (a * (b - tl.sum(a * b, 0))).to(y.dtype.element_ty), mask=c < D)


@triton.jit
def logsumexp_rows(x, y, scale, D: tl.constexpr, BD: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BD)
    t = tl.load(x + pid * D + c, mask=c < D, other=0.0).to(tl.float32) * scale
    t = tl.where(c < D, t, -float("inf"))
    top = tl.max(t, 0)
    # An infinite maximum is the result itself; subtracting it would give NaN.
    top = tl.where((top == float("inf")) | (top == -float("inf")), 0.0, top)
    tl.store(y + pid, (tl.log(tl.sum(tl.exp(t - top), 0)) + top).to(y.dtype.element_ty))


@triton.jit(do_not_specialize=["T", "NT"])
def chunk_means(
    x, y, table, T, NT, S: tl.constexpr, BS: tl.constexpr, C: tl.constexpr, BT: tl.constexpr, GRAD: tl.constexpr,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """Mean of each chunk of ``x`` `[rows, S]` to ``y`` `[chunks, S]`. GRAD: share out ``y`` to the rows of ``x``."""
    NS: tl.constexpr = (S + BS - 1) // BS
    pid = tl.program_id(0)
    it = pid // NS
    row, n = chunk_at(table, it, T, NT, C, VARLEN)
    if n <= 0:
        return
    c = (pid % NS) * BS + tl.arange(0, BS)
    rr = tl.arange(0, BT)
    out = y + it.to(tl.int64) * S + c
    share = tl.load(out, mask=c < S, other=0.0).to(tl.float32) / n if GRAD else tl.zeros((BS,), tl.float32)
    for r0 in tl.range(0, n, BT, num_stages=1):
        at = x + (row + r0 + rr).to(tl.int64)[:, None] * S + c[None, :]
        m = (r0 + rr < n)[:, None] & (c < S)[None, :]
        if GRAD:
            tl.store(at, (share[None, :] + tl.zeros((BT, BS), tl.float32)).to(x.dtype.element_ty), mask=m)
        else:
            share += tl.sum(tl.load(at, mask=m, other=0.0).to(tl.float32), 0)
    if not GRAD:
        tl.store(out, (share / n).to(y.dtype.element_ty), mask=c < S)


@triton.jit(do_not_specialize=["W"])
def move_rows(
    padded, packed, cu, W, S: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, LEFT: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Between ``padded`` `[N, W, S]` and ``packed`` `[rows, S]`; PAD: fill the padded one, zeros included."""
    NS: tl.constexpr = (S + BS - 1) // BS
    pid = tl.program_id(0)
    blocks = (W + BT - 1) // BT
    i = pid // (NS * blocks)
    r = ((pid // NS) % blocks) * BT + tl.arange(0, BT)
    c = (pid % NS) * BS + tl.arange(0, BS)
    bos = tl.load(cu + i).to(tl.int64)
    length = tl.load(cu + i + 1).to(tl.int64) - bos
    t = r - (W - length) if LEFT else r.to(tl.int64)
    a = padded + (i.to(tl.int64) * W + r)[:, None] * S + c[None, :]
    b = packed + (bos + t)[:, None] * S + c[None, :]
    inside = (r < W)[:, None] & (c < S)[None, :]
    used = inside & ((t >= 0) & (t < length))[:, None]
    if PAD:
        tl.store(a, tl.load(b, mask=used, other=0), mask=inside)
    else:
        tl.store(b, tl.load(a, mask=used, other=0), mask=used)
