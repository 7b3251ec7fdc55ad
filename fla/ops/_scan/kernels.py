# SPDX-License-Identifier: MIT
# mypy: ignore-errors
"""Kernels of the elementwise recurrence ``h_t = exp(g_t) h_{t-1} + x_t``.

A program walks a stretch of time with a block of channels. A tile is `[BT, W, BD]`: ``W`` runs of ``BT`` tokens side by
side, so that every thread scans tokens of its own one after another; then the runs are joined, and with them the state
that the tile starts from, while the loads of the next tiles are in flight. Where channels alone leave the chip idle,
time is cut into stretches: a first launch (``SUMMARY``) sums up what each stretch does to a state, and every program of
the second joins the summaries before its own. Only products of decays are formed, so any gate is exact.
"""

import triton
import triton.language as tl

from fla.ops._common.bisect import sequence_of


@triton.jit
def decay(g, FAST: tl.constexpr):
    """``exp(g)``; ``FAST``: in two instructions instead of five, and 0 below the smallest normal number."""
    if FAST:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [g * 1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp(g)


@triton.jit
def join(a0, x0, a1, x1):
    return a0 * a1, x0 * a1 + x1


@triton.jit
def join_before(a0, x0, b0, y0, a1, x1, b1, y1):
    """`join`, and as (b, y) everything but the last element."""
    return a0 * a1, x0 * a1 + x1, a0 * b1, x0 * b1 + y1


@triton.jit
def last(x, N: tl.constexpr):
    """The last of ``N`` entries along the first axis."""
    n = tl.arange(0, N)
    if len(x.shape) == 3:
        return tl.sum(tl.where((n == N - 1)[:, None, None], x, 0.0), 0)
    else:
        return tl.sum(tl.where((n == N - 1)[:, None], x, 0.0), 0)


@triton.jit
def scan_tile(a, v, h, BT: tl.constexpr, W: tl.constexpr):
    """Scan of a tile that starts from state ``h``: the states, the last one, and the product of all factors."""
    a, v = tl.associative_scan((a, v), 0, join)
    run_a = last(a, BT)
    run_v = last(v, BT)
    all_a, all_v, before_a, before_v = tl.associative_scan(
        (run_a, run_v, tl.zeros_like(run_a) + 1.0, tl.zeros_like(run_v)), 0, join_before
    )
    v += a * (before_a * h[None, :] + before_v)[None, :, :]
    return v, last(all_a * h[None, :] + all_v, W), last(all_a, W)


@triton.jit
def here(pid, segments, D: tl.constexpr, BD: tl.constexpr):
    """Channels, stretch and row of the batch of a program.

    The channels count as known to be even and nothing more: a thread then takes two at a time, and tokens stay within
    threads.
    """
    BLOCKS: tl.constexpr = (D + BD - 1) // BD
    rest = pid // BLOCKS
    return tl.multiple_of((pid % BLOCKS) * BD + tl.arange(0, BD), 2), rest % segments, (rest // segments).to(tl.int64)


@triton.jit
def fwd_tile(
    x, g, o, h0, ht, cu, h, t0, stop, cols, T, N, steps,
    D: tl.constexpr, BT: tl.constexpr, W: tl.constexpr, BD: tl.constexpr, SUMMARY: tl.constexpr, FINAL: tl.constexpr,
    FAST: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """One tile from token ``t0``: the state after it, and the product of its factors. ``TAIL``: rows from ``stop`` on
    do not exist."""
    r = tl.arange(0, W)[None, :] * BT + tl.arange(0, BT)[:, None]
    live = (cols < D)[None, None, :]
    mask = live & (t0 + r < stop)[:, :, None] if TAIL else live
    skip = tl.cast(t0, tl.int64) * D
    at = r[:, :, None] * D + cols[None, None, :]
    # Rows past the end change nothing: factor 1, sum 0.
    a = decay(tl.load(g + skip + at, mask=mask, other=0.0).to(tl.float32), FAST)
    v = tl.load(x + skip + at, mask=mask, other=0.0).to(tl.float32)
    if cu is not None:
        t = t0 + r
        seq, first, end = sequence_of(cu, tl.minimum(t, T - 1), T, N, steps)
        begins = ((t == first) & (t < stop))[:, :, None]
        state = seq[:, :, None].to(tl.int64) * D + cols[None, None, :]
        if h0 is not None:
            v += a * tl.load(h0 + state, mask=begins & live, other=0.0).to(tl.float32)
        a = tl.where(begins, 0.0, a)
    v, h, product = scan_tile(a, v, h, BT, W)
    if not SUMMARY:
        tl.store(o + skip + at, v.to(o.dtype.element_ty), mask=mask)
        if cu is not None and FINAL:
            tl.store(ht + state, v, mask=mask & (t == end - 1)[:, :, None])
    return h, product


@triton.jit(do_not_specialize=["T", "N", "steps", "span", "segments"])
def scan_fwd_kernel(
    x, g, h0, cu, o, ht, factors, sums, T, N, steps, span, segments,
    D: tl.constexpr, BT: tl.constexpr, W: tl.constexpr, BD: tl.constexpr, SUMMARY: tl.constexpr, FINAL: tl.constexpr,
    FAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``factors``, ``sums``: the summaries `[B, segments, D]`."""
    cols, segment, b = here(tl.program_id(0), segments, D, BD)
    live = cols < D
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
    whole = start + (stop - start) // (BT * W) * (BT * W)
    for t0 in tl.range(start, whole, BT * W, num_stages=STAGES):
        h, product = fwd_tile(
            x + base, g + base, o if SUMMARY else o + base, h0, ht, cu, h, t0, stop, cols, T, N, steps, D, BT, W, BD,
            SUMMARY, FINAL, FAST, False,
        )  # fmt: skip
        total *= product
    if whole < stop:
        h, product = fwd_tile(
            x + base, g + base, o if SUMMARY else o + base, h0, ht, cu, h, whole, stop, cols, T, N, steps, D, BT, W, BD,
            SUMMARY, FINAL, FAST, True,
        )  # fmt: skip
        total *= product
    if SUMMARY:
        at = (b * segments + segment) * D + cols
        tl.store(factors + at, total, mask=live)
        tl.store(sums + at, h, mask=live)
    elif FINAL and cu is None:
        # Every stretch knows its last state; that of the sequence is the last one's.
        tl.store(ht + b * D + cols, h, mask=live & (segment == segments - 1))


@triton.jit
def bwd_tile(
    do, g, o, h0, dht, cu, dx, dg, dh0, dh, t0, start, cols, T, N, steps,
    D: tl.constexpr, BT: tl.constexpr, W: tl.constexpr, BD: tl.constexpr, SUMMARY: tl.constexpr,
    INITIAL: tl.constexpr, FAST: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """One tile from token ``t0`` down. ``TAIL``: rows before ``start`` do not exist."""
    r = tl.arange(0, W)[None, :] * BT + tl.arange(0, BT)[:, None]
    live = (cols < D)[None, None, :]
    t = t0 - r
    mask = live & (t >= start)[:, :, None] if TAIL else live
    skip = tl.cast(t0, tl.int64) * D
    at = cols[None, None, :] - r[:, :, None] * D
    v = tl.load(do + skip + at, mask=mask, other=0.0).to(tl.float32)
    # The factor of the token after; 1 past the end, where a dense call carries the final state's gradient.
    after = mask & (t + 1 < T)[:, :, None]
    if cu is not None:
        seq, first, end = sequence_of(cu, tl.maximum(t, 0), T, N, steps)
        state = seq[:, :, None].to(tl.int64) * D + cols[None, None, :]
        ends = (t == end - 1)[:, :, None]
        begins = (t == first)[:, :, None]
        if TAIL:
            ends = ends & (t >= start)[:, :, None]
            begins = begins & (t >= start)[:, :, None]
        if dht is not None:
            v += tl.load(dht + state, mask=ends & live, other=0.0).to(tl.float32)
        a = decay(tl.load(g + skip + D + at, mask=after, other=0.0).to(tl.float32), FAST)
        a = tl.where(ends, 0.0, a)
        inner = mask & (t > first)[:, :, None]
    else:
        a = decay(tl.load(g + skip + D + at, mask=after, other=0.0).to(tl.float32), FAST)
        inner = mask & (t > 0)[:, :, None]
    v, dh, product = scan_tile(a, v, dh, BT, W)
    if not SUMMARY:
        tl.store(dx + skip + at, v.to(dx.dtype.element_ty), mask=mask)
        own = decay(tl.load(g + skip + at, mask=mask, other=0.0).to(tl.float32), FAST) * v
        before = tl.load(o + skip - D + at, mask=inner, other=0.0).to(tl.float32)
        written = mask
        if h0 is not None:
            if cu is None:
                written = inner  # the kernel writes the first token's
            else:
                before += tl.load(h0 + state, mask=begins & live, other=0.0).to(tl.float32)
        tl.store(dg + skip + at, (own * before).to(dg.dtype.element_ty), mask=written)
        if INITIAL and cu is not None:
            tl.store(dh0 + state, own.to(dh0.dtype.element_ty), mask=begins & live)
    return dh, product


@triton.jit(do_not_specialize=["T", "N", "steps", "span", "segments"])
def scan_bwd_kernel(
    do, g, o, h0, dht, cu, dx, dg, dh0, factors, sums, T, N, steps, span, segments,
    D: tl.constexpr, BT: tl.constexpr, W: tl.constexpr, BD: tl.constexpr, SUMMARY: tl.constexpr,
    INITIAL: tl.constexpr, FAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The adjoint ``dh_t = do_t + exp(g_{t+1}) dh_{t+1}``, from the end to the start."""
    cols, segment, b = here(tl.program_id(0), segments, D, BD)
    live = cols < D
    start = segment * span
    stop = tl.minimum(start + span, T)
    base = b * T * D
    dh = tl.zeros((BD,), tl.float32)
    total = dh + 1.0
    if not SUMMARY:
        if dht is not None and cu is None:
            dh += tl.load(dht + b * D + cols, mask=live, other=0.0).to(tl.float32)
        if factors is not None:
            for s in range(segments - 1 - segment):
                at = (b * segments + segments - 1 - s) * D + cols
                dh = tl.load(factors + at, mask=live, other=0.0) * dh + tl.load(sums + at, mask=live, other=0.0)
    whole = (stop - start) // (BT * W) * (BT * W)
    for done in tl.range(0, whole, BT * W, num_stages=STAGES):
        dh, product = bwd_tile(
            do + base, g + base, o + base, h0, dht, cu, dx if SUMMARY else dx + base, dg if SUMMARY else dg + base, dh0,
            dh, stop - 1 - done, start, cols, T, N, steps, D, BT, W, BD, SUMMARY, INITIAL, FAST, False,
        )  # fmt: skip
        total *= product
    if whole < stop - start:
        dh, product = bwd_tile(
            do + base, g + base, o + base, h0, dht, cu, dx if SUMMARY else dx + base, dg if SUMMARY else dg + base, dh0,
            dh, stop - 1 - whole, start, cols, T, N, steps, D, BT, W, BD, SUMMARY, INITIAL, FAST, True,
        )  # fmt: skip
        total *= product
    if SUMMARY:
        at = (b * segments + segment) * D + cols
        tl.store(factors + at, total, mask=live)
        tl.store(sums + at, dh, mask=live)
    elif h0 is not None and cu is None:
        mask = live & (segment == 0)
        own = decay(tl.load(g + base + cols, mask=mask, other=0.0).to(tl.float32), FAST) * dh
        state = tl.load(h0 + b * D + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(dg + base + cols, (own * state).to(dg.dtype.element_ty), mask=mask)
        if INITIAL:
            tl.store(dh0 + b * D + cols, own.to(dh0.dtype.element_ty), mask=mask)
