# SPDX-License-Identifier: MIT
# mypy: ignore-errors
"""Kernels of the norm engine: rows of ``W`` channels, ``G`` of them side by side in a row of the tensor.

``KIND`` is how a row is scaled (layer, RMS, L2), ``GATE`` the function of ``g`` that multiplies the result, or, last in
the list, the row before it is normalised. Everything is computed in fp32.
"""

import triton
import triton.language as tl

LAYER, RMS, L2 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
NO_GATE, SWISH, SIGMOID, SWISH_FIRST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def load_tile(p, offset, mask, FULL: tl.constexpr):
    if FULL:
        return tl.load(p + offset).to(tl.float32)
    else:
        return tl.load(p + offset, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_tile(p, offset, value, mask, FULL: tl.constexpr):
    if FULL:
        tl.store(p + offset, value.to(p.dtype.element_ty))
    else:
        tl.store(p + offset, value.to(p.dtype.element_ty), mask=mask)


@triton.jit
def load_channels(p, cols, live, BW: tl.constexpr, W: tl.constexpr):
    """One value for each channel of a group, as a row."""
    if BW == W:
        return tl.load(p + cols).to(tl.float32)[None, :]
    else:
        return tl.load(p + cols, mask=live, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["rows", "eps"])
def norm_fwd_kernel(
    x, res, g, w, b, y, stream, mean, rstd, rows, eps,
    W: tl.constexpr, G: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr, KIND: tl.constexpr, GATE: tl.constexpr,
    STREAM: tl.constexpr, STATS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    group = pid % G
    first = (pid // G) * BR
    # With one row a program every tile is full, as far as rows go.
    FULL: tl.constexpr = BR == 1 and BW == W
    r = tl.arange(0, BR)
    cols = tl.arange(0, BW)
    live = cols < W
    mask = (first + r < rows)[:, None] & live[None, :]
    base = (first.to(tl.int64) * G + group) * W
    at = r[:, None] * (G * W) + cols[None, :]
    s = load_tile(x + base, at, mask, FULL)
    if res is not None:
        s += load_tile(res + base, at, mask, FULL)
    if STREAM:
        store_tile(stream + base, at, s, mask, FULL)
    if GATE != NO_GATE:
        gate = load_tile(g + base, at, mask, FULL)
    if GATE == SWISH_FIRST:
        s = s * gate * tl.sigmoid(gate)
    if KIND == LAYER:
        mu = tl.sum(s, 1) / W
        s = tl.where(live[None, :], s - mu[:, None], 0.0) if BW != W else s - mu[:, None]
    square = tl.sum(s * s, 1)
    rs = tl.rsqrt((square if KIND == L2 else square / W) + eps)
    if STATS:
        stat = (first + r).to(tl.int64) * G + group
        tl.store(rstd + stat, rs, mask=first + r < rows)
        if KIND == LAYER:
            tl.store(mean + stat, mu, mask=first + r < rows)
    n = s * rs[:, None]
    if w is not None:
        n = n * load_channels(w + group * W, cols, live, BW, W)
    if b is not None:
        n = n + load_channels(b + group * W, cols, live, BW, W)
    if GATE == SWISH:
        n = n * gate * tl.sigmoid(gate)
    if GATE == SIGMOID:
        n = n * tl.sigmoid(gate)
    store_tile(y + base, at, n, mask, FULL)


@triton.jit(do_not_specialize=["rows", "programs", "eps"])
def norm_bwd_kernel(
    s, dy, ds, g, w, b, mean, rstd, dx, dres, dg, y, part, rows, programs, eps,
    W: tl.constexpr, G: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr, KIND: tl.constexpr, GATE: tl.constexpr,
    DW: tl.constexpr, DB: tl.constexpr, DRES: tl.constexpr, AGAIN: tl.constexpr, DONE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Each program takes every ``programs``-th tile of one group and leaves one row of partial sums, first of the
    weight's gradient, then of the bias's. Without ``rstd`` the statistics are computed again, which is cheaper than
    keeping them. ``AGAIN`` writes the forward's result once more; ``DONE``: ``s`` has been normalised already."""
    pid = tl.program_id(0)
    group = pid % G
    start = pid // G
    FULL: tl.constexpr = BR == 1 and BW == W
    r = tl.arange(0, BR)
    cols = tl.arange(0, BW)
    live = cols < W
    at = r[:, None] * (G * W) + cols[None, :]
    if w is not None:
        weight = load_channels(w + group * W, cols, live, BW, W)
    if b is not None:
        bias = load_channels(b + group * W, cols, live, BW, W)
    if DW:
        dw_sum = tl.zeros((BR, BW), tl.float32)
    if DB:
        db_sum = tl.zeros((BR, BW), tl.float32)
    for tile in tl.range(start, tl.cdiv(rows, BR), programs, num_stages=STAGES):
        first = tile * BR
        here = first + r < rows
        mask = here[:, None] & live[None, :]
        base = (first.to(tl.int64) * G + group) * W
        u = load_tile(s + base, at, mask, FULL)
        dn = load_tile(dy + base, at, mask, FULL)
        if GATE != NO_GATE:
            gate = load_tile(g + base, at, mask, FULL)
            sig = tl.sigmoid(gate)
        v = u * gate * sig if GATE == SWISH_FIRST else u
        if rstd is not None:
            stat = (first + r).to(tl.int64) * G + group
            rs = tl.load(rstd + stat, mask=here, other=0.0)
            if KIND == LAYER and not DONE:
                v = v - tl.load(mean + stat, mask=here, other=0.0)[:, None]
        else:
            if KIND == LAYER:
                v = v - (tl.sum(v, 1) / W)[:, None]
                v = tl.where(live[None, :], v, 0.0) if BW != W else v
            square = tl.sum(v * v, 1)
            rs = tl.rsqrt((square if KIND == L2 else square / W) + eps)
        rs = rs[:, None]
        if not DONE:
            v = v * rs
        if AGAIN or (GATE != NO_GATE and GATE != SWISH_FIRST):
            n = v * weight if w is not None else v
            n = n + bias if b is not None else n
        if GATE == SWISH:
            store_tile(dg + base, at, dn * n * sig * (1.0 + gate * (1.0 - sig)), mask, FULL)
            dn = dn * gate * sig
            if AGAIN:
                n = n * gate * sig
        if GATE == SIGMOID:
            store_tile(dg + base, at, dn * n * sig * (1.0 - sig), mask, FULL)
            dn = dn * sig
            if AGAIN:
                n = n * sig
        if AGAIN:
            store_tile(y + base, at, n, mask, FULL)
        if DW:
            dw_sum += dn * v
        if DB:
            db_sum += dn
        if w is not None:
            dn = dn * weight
        c = tl.sum(dn * v, 1)[:, None]
        if KIND != L2:
            c = c / W
        du = dn - v * c
        if KIND == LAYER:
            du = du - (tl.sum(dn, 1) / W)[:, None]
        du = du * rs
        if ds is not None:
            du += load_tile(ds + base, at, mask, FULL)
        if GATE == SWISH_FIRST:
            store_tile(dg + base, at, du * u * sig * (1.0 + gate * (1.0 - sig)), mask, FULL)
            du = du * gate * sig
        store_tile(dx + base, at, du, mask, FULL)
        if DRES:
            store_tile(dres + base, at, du, mask, FULL)
    row = (start.to(tl.int64) * G + group) * W
    if DW:
        tl.store(part + row + cols, tl.sum(dw_sum, 0), mask=live)
        row += programs.to(tl.int64) * (G * W)
    if DB:
        tl.store(part + row + cols, tl.sum(db_sum, 0), mask=live)


@triton.jit(do_not_specialize=["programs"])
def norm_sum_kernel(
    part, dw, db, programs,
    D: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr, DW: tl.constexpr, DB: tl.constexpr,
):  # fmt: skip
    """The sums of the partial sums, always in the same order."""
    cols = tl.program_id(0) * BD + tl.arange(0, BD)
    r = tl.arange(0, BP)
    live = cols < D
    for which in tl.static_range(DW + DB):
        total = tl.zeros((BP, BD), tl.float32)
        base = part + which * programs.to(tl.int64) * D
        for p0 in range(0, programs, BP):
            at = (p0 + r)[:, None] * D + cols[None, :]
            total += tl.load(base + at, mask=(p0 + r < programs)[:, None] & live[None, :], other=0.0)
        value = tl.sum(total, 0)
        if DW and which == 0:
            tl.store(dw + cols, value.to(dw.dtype.element_ty), mask=live)
        else:
            tl.store(db + cols, value.to(db.dtype.element_ty), mask=live)
