# SPDX-License-Identifier: MIT
# mypy: ignore-errors
"""Kernels of the elementwise recurrence ``h_t = exp(g_t) h_{t-1} + x_t``.

A program walks a stretch of time with a block of channels. Each tile of tokens is scanned associatively and then joined
to the state it starts from, so that the loads of the next tiles are in flight meanwhile. Where channels alone leave the
chip idle, time is cut into stretches: a first launch (``SUMMARY``) sums up what each stretch does to a state, and every
program of the second joins the summaries before its own. Only products of decays are formed, so any gate is exact.
"""

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


@triton.jit
def join(a0, x0, a1, x1):
    return a0 * a1, x0 * a1 + x1


@triton.jit
def last_row(x, BT: tl.constexpr):
    return tl.sum(tl.where((tl.arange(0, BT) == BT - 1)[:, None], x, 0.0), 0)


@triton.jit
def here(pid, segments, D: tl.constexpr, BD: tl.constexpr):
    """Channels, stretch and row of the batch of a program."""
    BLOCKS: tl.constexpr = (D + BD - 1) // BD
    rest = pid // BLOCKS
    return (pid % BLOCKS) * BD + tl.arange(0, BD), rest % segments, (rest // segments).to(tl.int64)


@triton.jit(do_not_specialize=["T", "N", "steps", "span", "segments"])
def scan_fwd_kernel(
    x, g, h0, cu, o, ht, factors, sums, T, N, steps, span, segments,
    D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, SUMMARY: tl.constexpr, FINAL: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """``factors``, ``sums``: the summaries `[B, segments, D]`."""
    cols, segment, b = here(tl.program_id(0), segments, D, BD)
    live = cols < D
    r = tl.arange(0, BT)
    start = segment * span
    stop = tl.minimum(start + span, T)
    base = b * T * D
    h = tl.zeros((BD,), tl.float32)
    total = h + 1.0
    if not SUMMARY:
        if h0 is not None and cu is None:
            h += tl.load(h0 + b * D + cols, mask=live, other=0.0).to(tl.float32)
        if factors is not None:
            for s in range(segment):
                at = (b * segments + s) * D + cols
                h = tl.load(factors + at, mask=live, other=0.0) * h + tl.load(sums + at, mask=live, other=0.0)
    for t0 in tl.range(start, stop, BT, num_stages=STAGES):
        t = t0 + r
        mask = (t < stop)[:, None] & live[None, :]
        at = base + t[:, None].to(tl.int64) * D + cols[None, :]
        # Rows past the end change nothing: factor 1, sum 0.
        a = tl.exp(tl.load(g + at, mask=mask, other=0.0).to(tl.float32))
        v = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        if cu is not None:
            seq, first, end = sequence_of(cu, tl.minimum(t, T - 1), T, N, steps)
            begins = ((t == first) & (t < stop))[:, None]
            state = seq[:, None].to(tl.int64) * D + cols[None, :]
            if h0 is not None:
                v += a * tl.load(h0 + state, mask=begins & live[None, :], other=0.0).to(tl.float32)
            a = tl.where(begins, 0.0, a)
        a, v = tl.associative_scan((a, v), 0, join)
        if SUMMARY:
            total *= last_row(a, BT)
        v += a * h[None, :]
        h = last_row(v, BT)
        if not SUMMARY:
            tl.store(o + at, v.to(o.dtype.element_ty), mask=mask)
            if cu is not None and FINAL:
                tl.store(ht + state, v, mask=mask & (t == end - 1)[:, None])
    if SUMMARY:
        at = (b * segments + segment) * D + cols
        tl.store(factors + at, total, mask=live)
        tl.store(sums + at, h, mask=live)
    elif FINAL and cu is None:
        # Every stretch knows its last state; that of the sequence is the last one's.
        tl.store(ht + b * D + cols, h, mask=live & (segment == segments - 1))


@triton.jit(do_not_specialize=["T", "N", "steps", "span", "segments"])
def scan_bwd_kernel(
    do, g, o, h0, dht, cu, dx, dg, dh0, factors, sums, T, N, steps, span, segments,
    D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, SUMMARY: tl.constexpr, INITIAL: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The adjoint ``dh_t = do_t + exp(g_{t+1}) dh_{t+1}``, from the end to the start."""
    cols, segment, b = here(tl.program_id(0), segments, D, BD)
    live = cols < D
    r = tl.arange(0, BT)
    start = segment * span
    stop = tl.minimum(start + span, T)
    base = b * T * D
    dh = tl.zeros((BD,), tl.float32)
    total = dh + 1.0
    if not SUMMARY and factors is not None:
        for s in range(segments - 1 - segment):
            at = (b * segments + segments - 1 - s) * D + cols
            dh = tl.load(factors + at, mask=live, other=0.0) * dh + tl.load(sums + at, mask=live, other=0.0)
    for t0 in tl.range(0, stop - start, BT, num_stages=STAGES):
        t = stop - 1 - t0 - r
        inside = t >= start
        mask = inside[:, None] & live[None, :]
        at = base + t[:, None].to(tl.int64) * D + cols[None, :]
        if cu is not None:
            seq, first, end = sequence_of(cu, tl.maximum(t, 0), T, N, steps)
        else:
            seq = tl.zeros_like(t) + b.to(tl.int32)
            first = tl.zeros_like(t)
            end = first + T
        ends = (inside & (t == end - 1))[:, None]
        begins = (inside & (t == first))[:, None]
        state = seq[:, None].to(tl.int64) * D + cols[None, :]
        v = tl.load(do + at, mask=mask, other=0.0).to(tl.float32)
        if dht is not None:
            v += tl.load(dht + state, mask=ends & live[None, :], other=0.0).to(tl.float32)
        # The factor of the token after; 1 where there is nothing, 0 past the end of a sequence.
        a = tl.exp(tl.load(g + at + D, mask=mask & (t + 1 < end)[:, None], other=0.0).to(tl.float32))
        a = tl.where(ends, 0.0, a)
        a, v = tl.associative_scan((a, v), 0, join)
        if SUMMARY:
            total *= last_row(a, BT)
        v += a * dh[None, :]
        dh = last_row(v, BT)
        if not SUMMARY:
            tl.store(dx + at, v.to(dx.dtype.element_ty), mask=mask)
            own = tl.exp(tl.load(g + at, mask=mask, other=0.0).to(tl.float32)) * v
            before = tl.load(o + at - D, mask=mask & (t > first)[:, None], other=0.0).to(tl.float32)
            if h0 is not None:
                before += tl.load(h0 + state, mask=begins & live[None, :], other=0.0).to(tl.float32)
            tl.store(dg + at, (own * before).to(dg.dtype.element_ty), mask=mask)
            if INITIAL:
                tl.store(dh0 + state, own.to(dh0.dtype.element_ty), mask=begins & live[None, :])
    if SUMMARY:
        at = (b * segments + segment) * D + cols
        tl.store(factors + at, total, mask=live)
        tl.store(sums + at, dh, mask=live)
