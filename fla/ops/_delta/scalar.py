# SPDX-License-Identifier: MIT
"""Host side of the scalar-decay kernels: buffers, descriptors and launches. No autograd here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fla.ops._common.device_index import ChunkTable, chunk_table, table_size
from fla.ops._common.gates import needs_range
from fla.ops._common.launch import Fixed, Launcher, descriptor
from fla.ops._common.policy import Chip, chip_of
from fla.ops._common.room import Parts, carve, like, room_for, total
from fla.ops._delta import chunk_groups, groups
from fla.ops._delta.kernels.common import any_long
from fla.ops._delta.kernels.scalar_grad import scalar_fold, scalar_grad
from fla.ops._delta.kernels.scalar_prep import SC, scalar_prep
from fla.ops._delta.kernels.scalar_scan import scalar_merge, scalar_reverse, scalar_scan
from fla.ops._delta.kernels.scalar_wide import scalar_scores, scalar_wide_grad
from fla.ops._delta.policy import ScalarPlan, long_plan, scalar_plan, time_segments

_SC = SC.value
_prep, _scan, _reverse = Launcher(scalar_prep), Launcher(scalar_scan), Launcher(scalar_reverse)
_PLAIN = {"num_warps": 4, "num_stages": 1}
_grad, _fold, _merge = Launcher(scalar_grad), Launcher(scalar_fold), Launcher(scalar_merge)
_any_long = Launcher(any_long)
_scores, _wide_grad = Launcher(scalar_scores), Launcher(scalar_wide_grad)


@dataclass(frozen=True)
class Shape:
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> Shape:
        B, T, H, K = k.shape
        return cls(B, T, H, v.shape[2], K, v.shape[3])


@dataclass(frozen=True)
class ScalarCall:
    """What does not change between forward and backward of one call. ``g`` None: no decay; ``A_log`` None: g is it."""

    shape: Shape
    plan: ScalarPlan
    chip: Chip
    table: ChunkTable
    scale: float
    beta_scale: float  # 0: beta is used as it is; else beta_scale * sigmoid(beta)
    norm: bool
    v_first: bool
    segments: int = 1  # stretches that each sequence is cut into
    before: bool = False  # the state is read before its decay
    part: int = 0  # of two forms of the call, which: 1 that in float16, 2 that in float32; 0 there is one form
    other: ScalarCall | None = None  # the form in float32
    launches: dict[Any, Fixed] = field(default_factory=dict, compare=False, repr=False)
    tapes: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def tail(self) -> bool:
        """Whether there may be chunks that are not full."""
        return self.table.varlen or self.shape.T % self.plan.chunk != 0

    @classmethod
    def make(
        cls, k: Tensor, v: Tensor, scale: float, norm: bool, beta_scale: float, v_first: bool,
        cu_seqlens: Tensor | None, chip: Chip | None = None, plan: ScalarPlan | None = None,
        segments: int | None = None, read: bool = False, before: bool = False,
    ) -> ScalarCall:  # fmt: skip
        if chip is None and plan is None and segments is None:
            return _call_of(
                k.shape, v.shape, k.dtype, chip_of(k.device), None if cu_seqlens is None else cu_seqlens.numel() - 1,
                scale, norm, beta_scale, v_first, read, before,
            )  # fmt: skip
        chip = chip_of(k.device) if chip is None else chip
        sequences = k.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
        if plan is None:
            plan = scalar_plan(chip, k.dtype, k.shape[-1], v.shape[-1], sequences * v.shape[2], norm, read)
        table = chunk_table(k.shape[0], k.shape[1], plan.chunk, cu_seqlens)
        if segments is None:
            segments = time_segments(plan, chip, sequences * v.shape[2], v.shape[-1], table.chunks // max(sequences, 1))
        call = cls(Shape.of(k, v), plan, chip, table, scale, beta_scale, norm, v_first, segments, before)
        return call.ranged() if needs_range(k.dtype) else call

    def ranged(self) -> ScalarCall:
        """This call with another form for what float16 has no room for."""
        other = replace(self, plan=long_plan(self.plan, self.shape.K, self.shape.V), segments=1, part=2, launches={})
        return replace(self, part=1, other=other)

    @property
    def keeps_output(self) -> bool:
        """Whether the backward reads the output: what the norms take away needs all of K, or that."""
        return self.norm and self.plan.grad_k < self.shape.K

    def work(self, x: Tensor) -> torch.dtype:
        """Dtype of everything between the inputs ``x`` and the outputs."""
        return torch.float32 if self.part == 2 else x.dtype

    def packed(self, table: ChunkTable) -> ScalarCall:
        """This call with the table of its sequences; what launches have in common stays in one place."""
        return replace(self, table=table, other=None if self.other is None else replace(self.other, table=table))


@functools.lru_cache(maxsize=256)
def _call_of(
    k: tuple[int, ...], v: tuple[int, ...], dtype: torch.dtype, chip: Chip, packed: int | None, scale: float,
    norm: bool, beta_scale: float, v_first: bool, read: bool, before: bool,
) -> ScalarCall:  # fmt: skip
    # One object for all calls of these sizes, because it keeps what their launches have in common. That of ``packed``
    # sequences has no table yet.
    B, T, H, K = k
    sequences = B if packed is None else packed
    plan = scalar_plan(chip, dtype, K, v[3], sequences * v[2], norm, read)
    table = chunk_table(B, T, plan.chunk) if packed is None else table_size(T, plan.chunk, packed)
    segments = time_segments(plan, chip, sequences * v[2], v[3], table.chunks // max(sequences, 1))
    shape = Shape(B, T, H, v[2], K, v[3])
    call = ScalarCall(shape, plan, chip, table, scale, beta_scale, norm, v_first, segments, before)
    return call.ranged() if needs_range(dtype) else call


def _descriptor(x: Tensor, rows: int, cols: int, block_rows: int, block_cols: int, use: bool) -> Any:
    """A descriptor of ``x`` as a `[rows, cols]` matrix, or ``x`` where none is used."""
    return descriptor(x, rows, cols, block_rows, block_cols) if use else x


def _gate_mode(g: Tensor | None, A_log: Tensor | None) -> int:
    return 0 if g is None else (1 if A_log is None else 2)


def state_shape(call: ScalarCall, s: Shape) -> tuple[int, ...]:
    return (call.table.sequences, s.HV, *((s.V, s.K) if call.v_first else (s.K, s.V)))


def prepared(call: ScalarCall, k: Tensor) -> Parts:
    """Shapes and types of what `prepare` makes and the backward pass finds: T, A, scalars."""
    C, tiles = call.plan.chunk, call.table.chunks * call.shape.HV
    return ((tiles, C, C), call.work(k)), ((tiles, C, C), call.work(k)), ((tiles, _SC, C), torch.float32)


def prepare(
    call: ScalarCall, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, A_log: Tensor | None,
    dt_bias: Tensor | None, save: bool, read: Tensor | None = None, long: Tensor | None = None,
    room: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """T, A `[chunks * HV, C, C]`, the scalars `[chunks * HV, 8, C]` in fp32 and, of a call with two forms, what says
    which of them runs (`kernels.common`). The form in float32 is given that as ``long``. The first three lie in
    ``room``, if that is given."""
    # Here and below ``read`` is the read key, where the op has one of its own.
    p, t, s = call.plan, call.table, call.shape
    C, tiles, rows = p.chunk, t.chunks * s.HV, s.B * s.T
    parts = prepared(call, k)
    T, A, sc = carve(room_for(parts, k) if room is None else room, parts)
    marks = torch.empty(tiles, dtype=torch.int32, device=k.device) if call.part == 1 else long
    d = p.descriptors
    keep = save or min(p.step, p.forward_step or C) < C
    gluon = chunk_groups.serve_prepare(call)
    if gluon and chunk_groups.prepare(call, q, k, g, beta, A_log, dt_bias, keep, read, T, A, sc):
        return T, A, sc, None
    args = (
        q, k, k if read is None else read, _descriptor(q, rows, s.H * s.K, C, p.prep_k, d),
        _descriptor(k, rows, s.H * s.K, C, p.prep_k, d),
        k if read is None else _descriptor(read, rows, s.H * s.K, C, p.prep_k, d),
        beta if g is None else g, beta, beta if A_log is None else A_log, beta if dt_bias is None else dt_bias, T,
        _descriptor(T, tiles * C, C, C, C, d), A, _descriptor(A, tiles * C, C, C, C, d), sc,
        sc if marks is None else marks, sc if t.rows is None else t.rows, s.T, t.per_sequence, s.H, s.HV, call.scale,
        call.beta_scale, int(keep),
    )  # fmt: skip
    key = ("prep", _gate_mode(g, A_log), dt_bias is not None, read is not None)
    run = call.launches.get(key)
    if run is None:
        meta = {
            "K": s.K, "KB": p.prep_k, "C": C, "NORM": call.norm, "GATE": key[1], "BIAS": key[2],
            "SIGMOID": call.beta_scale > 0, "READ": key[3], "BEFORE": call.before, "VARLEN": t.varlen, "DESC": d,
            "DOT": p.dot, "INV": p.inverse, "PART": call.part,
        }  # fmt: skip
        run = call.launches[key] = _prep.fix(meta, p.options[0])
    run(tiles, args, (q, k, g, beta, A_log, dt_bias))
    if call.part == 1 and marks is not None:
        long = torch.empty(8, dtype=torch.int32, device=k.device)
        _any_long(1, (marks, long, tiles), {"BLOCK": 1024}, _PLAIN, (marks,))
    return T, A, sc, long


def _scan_args(
    call: ScalarCall, q: Tensor, k: Tensor, v: Tensor, T: Tensor, A: Tensor, sc: Tensor, h0: Tensor | None,
    entry: Tensor | None, o: Tensor | None, ht: Tensor | None, S: Tensor | None, U: Tensor | None, parts: int, bv: int,
    read: Tensor | None, long: Tensor | None,
) -> tuple[Any, ...]:  # fmt: skip
    p, t, s = call.plan, call.table, call.shape
    C, tiles, rows, d = p.chunk, t.chunks * s.HV, s.B * s.T, p.descriptors
    out = d and o is not None
    step = p.step if o is None else p.forward_step or p.step
    return (
        q, k, k if read is None else read, v, _descriptor(q, rows, s.H * s.K, step, p.block_k, out),
        _descriptor(k, rows, s.H * s.K, step, p.block_k, d),
        k if read is None else _descriptor(read, rows, s.H * s.K, step, p.block_k, d),
        _descriptor(v, rows, s.HV * s.V, step, bv, d), T, _descriptor(T, tiles * C, C, step, step, d), A,
        _descriptor(A, tiles * C, C, step, step, out), sc, v if o is None else o,
        v if o is None else _descriptor(o, rows, s.HV * s.V, step, bv, d),
        k if S is None else S, k if S is None else _descriptor(S, tiles * s.V, s.K, bv, p.block_k, d),
        k if U is None else U, k if U is None else _descriptor(U, tiles * s.V, C, bv, step, d),
        sc if h0 is None else h0,
        sc if ht is None else ht, sc if entry is None else entry, sc if long is None else long,
        sc if t.cu is None else t.cu,
        sc if t.offsets is None else t.offsets, s.T, t.per_sequence, s.H, s.HV, int(h0 is not None),
        int(ht is not None), call.segments, parts,
    )  # fmt: skip


def _scan_run(call: ScalarCall, bv: int, out: bool, save: bool, split: int, read: bool) -> Fixed:
    key = ("scan", bv, out, save, split, read)
    run = call.launches.get(key)
    if run is None:
        p, s = call.plan, call.shape
        step = (p.forward_step if out else None) or p.step
        meta = {
            "K": s.K, "V": s.V, "BK": p.block_k, "BV": bv, "C": p.chunk, "CS": step, "OUT": out, "SAVE": save,
            "SPLIT": split, "READ": read, "BEFORE": call.before, "VFIRST": call.v_first, "VARLEN": call.table.varlen,
            "TAIL": call.tail, "DESC": p.descriptors, "DOT": p.dot,
            "STAGES": (p.forward if out else p.recompute).stages, "PART": call.part,
        }  # fmt: skip
        run = call.launches[key] = _scan.fix(meta, p.options[1 if out else 2])
    return run


def entries(
    call: ScalarCall, q: Tensor, k: Tensor, v: Tensor, T: Tensor, A: Tensor, sc: Tensor, h0: Tensor | None,
    read: Tensor | None = None, long: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """States (transposed, padded, fp32) in which the stretches of each sequence begin; None where none is split."""
    if call.segments == 1:
        return None
    summary = _summaries(call, k)
    parts, bv = call.segments - 1, call.plan.block_v
    args = _scan_args(call, q, k, v, T, A, sc, h0, summary, None, None, None, None, parts, bv, read, long)
    run = _scan_run(call, bv, False, False, 2, read is not None)
    run(summary.shape[1] // bv * call.shape.HV * parts * call.table.sequences, args, (q, k, v, h0, call.table.cu))
    return _merged(call, summary)


def _summaries(call: ScalarCall, k: Tensor) -> Tensor:
    """Room for the affine map of each stretch: what becomes of no state, and below it of the unit matrix."""
    p, s, heads = call.plan, call.shape, call.table.sequences * call.segments * call.shape.HV
    rows = (-(-s.V // p.block_v) - (-s.K // p.block_v)) * p.block_v
    return torch.empty(heads, rows, p.block_k, dtype=torch.float32, device=k.device)


def _merged(call: ScalarCall, summary: Tensor) -> Tensor:
    """What the stretches begin with, from their maps; counted from the end of the sequence where the maps are."""
    p, t, s = call.plan, call.table, call.shape
    bv, bk = p.block_v, p.block_k
    nv, nk = -(-s.V // bv), -(-s.K // bv)
    entry = torch.empty(summary.shape[0], nv * bv, bk, dtype=torch.float32, device=summary.device)
    rows = 16
    _merge(
        nv * bv // rows * s.HV * t.sequences, (summary, entry, call.segments, s.HV),
        {"RV": nv * bv, "RK": nk * bv, "BK": bk, "BM": rows, "DOT": call.chip.exact}, _PLAIN, (),
    )  # fmt: skip
    return entry


def scan(
    call: ScalarCall, q: Tensor, k: Tensor, v: Tensor, T: Tensor, A: Tensor, sc: Tensor, h0: Tensor | None,
    entry: Tensor | None, output: bool, final: bool, save: bool, read: Tensor | None = None,
    long: Tensor | None = None, into: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """(o, final state, S^T `[chunks * HV, V, K]`, u^T `[chunks * HV, V, C]`), each None unless asked for.
    ``into``: o and the final state of the other form of the call."""
    p, t, s = call.plan, call.table, call.shape
    tiles, bv = t.chunks * s.HV, p.block_v if output else p.again_v
    o, ht = into
    if output and o is None:
        o = like(v)
    if final and ht is None:
        ht = torch.empty(state_shape(call, s), dtype=torch.float32, device=k.device)
    S = T.new_empty(tiles, s.V, s.K) if save else None
    U = T.new_empty(tiles, s.V, p.chunk) if save else None
    if groups.serve(call, save) and groups.scan(call, q, k, v, T, A, sc, h0, o, ht, S, U, read, long):
        return o, ht, S, U
    args = _scan_args(call, q, k, v, T, A, sc, h0, entry, o, ht, S, U, call.segments, bv, read, long)
    run = _scan_run(call, bv, output, save, int(entry is not None), read is not None)
    run(-(-s.V // bv) * s.HV * call.segments * t.sequences, args, (q, k, v, h0, t.cu))
    return o, ht, S, U


def reverse(
    call: ScalarCall, q: Tensor, k: Tensor, do: Tensor, T: Tensor, A: Tensor, sc: Tensor, dht: Tensor | None,
    dh0: Tensor | None, read: Tensor | None = None, long: Tensor | None = None, into: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(dv, X^T `[chunks * HV, V, K]`); fills ``dh0`` where given. ``into``: dv of the other form of the call, which is
    filled as well."""
    s = call.shape
    dv = like(do, dtype=T.dtype)
    X = T.new_empty(call.table.chunks * s.HV, s.V, s.K)
    if groups.serve(call) and groups.reverse(call, q, k, do, T, A, sc, dht, dh0, dv, X, read, long):
        return dv, X
    entry = None
    if call.segments > 1:
        summary = _summaries(call, k)
        _reverse_run(call, q, k, do, T, A, sc, dht, None, read, dv, X, summary, 2, long, into)
        entry = _merged(call, summary)
    _reverse_run(call, q, k, do, T, A, sc, dht, dh0, read, dv, X, entry, int(entry is not None), long, into)
    return dv, X


def _reverse_run(
    call: ScalarCall, q: Tensor, k: Tensor, do: Tensor, T: Tensor, A: Tensor, sc: Tensor, dht: Tensor | None,
    dh0: Tensor | None, read: Tensor | None, dv: Tensor, X: Tensor, entry: Tensor | None, split: int,
    long: Tensor | None, into: Tensor | None,
) -> None:  # fmt: skip
    p, t, s = call.plan, call.table, call.shape
    C, tiles, rows, d, bv, step = p.chunk, t.chunks * s.HV, s.B * s.T, p.descriptors, p.block_v, p.step
    parts = call.segments - 1 if split == 2 else call.segments
    args = (
        q, k, k if read is None else read, do, _descriptor(q, rows, s.H * s.K, step, p.block_k, d),
        _descriptor(k, rows, s.H * s.K, step, p.block_k, d),
        k if read is None else _descriptor(read, rows, s.H * s.K, step, p.block_k, d),
        _descriptor(do, rows, s.HV * s.V, step, bv, d), T, _descriptor(T, tiles * C, C, step, step, d), A,
        _descriptor(A, tiles * C, C, step, step, d), sc, dv,
        _descriptor(dv, rows, s.HV * s.V, step, bv, d) if into is None else into, X,
        _descriptor(X, tiles * s.V, s.K, bv, p.block_k, d), sc if dht is None else dht, sc if dh0 is None else dh0,
        sc if entry is None else entry, sc if long is None else long, sc if t.cu is None else t.cu,
        sc if t.offsets is None else t.offsets, s.T, t.per_sequence, s.H, s.HV, int(dht is not None),
        int(dh0 is not None), call.segments, parts,
    )  # fmt: skip
    key = ("reverse", read is not None, split)
    run = call.launches.get(key)
    if run is None:
        meta = {
            "K": s.K, "V": s.V, "BK": p.block_k, "BV": bv, "C": C, "CS": step, "SPLIT": split, "READ": key[1],
            "BEFORE": call.before, "VFIRST": call.v_first, "VARLEN": t.varlen, "TAIL": call.tail, "DESC": d,
            "DOT": p.dot, "STAGES": p.reverse.stages, "PART": call.part,
        }  # fmt: skip
        run = call.launches[key] = _reverse.fix(meta, p.options[3])
    blocks = -(-s.V // bv) - (-s.K // bv if split == 2 else 0)
    run(blocks * s.HV * parts * t.sequences, args, (q, k, do, dht, dh0, t.cu))


@dataclass
class Passed:
    """What the passes of the backward leave for the chunks: dv, states and their gradients, new values, scalars."""

    dv: Tensor
    S: Tensor
    U: Tensor
    X: Tensor
    sc: Tensor

    def release(self) -> None:
        """Let go of the memory; what a form in float16 no longer needs serves that in float32."""
        del self.dv, self.S, self.U, self.X, self.sc


@dataclass(frozen=True)
class Gradients:
    """dg, dbeta and dy (dg times the decay, with the gate in the kernel) are `[B, T, HV]`; dg, dy and dread may be
    None."""

    dq: Tensor
    dk: Tensor
    dg: Tensor | None
    dbeta: Tensor
    dy: Tensor | None
    dread: Tensor | None


def gradients(
    call: ScalarCall, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, A_log: Tensor | None,
    dt_bias: Tensor | None, do: Tensor, passed: Passed, read: Tensor | None = None, o: Tensor | None = None,
    long: Tensor | None = None, again: Callable[[], Passed] | None = None,
) -> Gradients:  # fmt: skip
    """``o``, the output, is needed where `ScalarCall.keeps_output`; ``again`` has the other form of the call make its
    passes, once it is known whether they are needed."""
    p, s = call.plan, call.shape
    blocks = -(-s.K // p.grad_k)
    wide = blocks > 1
    mode = _gate_mode(g, A_log)
    shape = (s.B, s.T, s.HV)
    kind: dict[str, Any] = {"device": k.device, "dtype": torch.float32}
    # Partial sums stay fp32; what is final is written in the caller's dtype at once.
    db = torch.empty((blocks, *shape), **kind) if wide else torch.empty(shape, device=k.device, dtype=beta.dtype)
    dg = dy = None
    if g is not None:
        direct = not wide and mode == 1
        dg = torch.empty(shape, device=k.device, dtype=g.dtype) if direct else torch.empty((blocks, *shape), **kind)
        dy = torch.empty((blocks, *shape), **kind) if mode == 2 else None
    dq = q.new_empty(s.B, s.T, s.HV, s.K)
    dk = like(dq)
    dread = None if read is None else like(dq)
    r = Gradients(dq, dk, dg, db, dy, dread)
    _run_gradients(call, q, k, v, g, beta, A_log, dt_bias, do, passed, read, o, long, r)
    if again is not None and call.other is not None:
        passed.release()
        _run_gradients(call.other, q, k, v, g, beta, A_log, dt_bias, do, again(), read, o, long, r)
    if s.HV > s.H:
        dqh, dkh, drh, dq, dk = dq, dk, dread, like(q), like(k)
        dread = None if read is None else like(read)
        width, rows = min(p.block_k, 128), s.B * s.T
        _fold(
            -(-s.K // width) * s.H * -(-rows // 32),
            (dqh, dkh, dkh if drh is None else drh, dq, dk, dk if dread is None else dread, rows, s.H, s.HV),
            {"K": s.K, "BR": 32, "BK": width, "READ": read is not None}, _PLAIN, (q, k),
        )  # fmt: skip
    if wide:
        db = total(db, 0)
    if dg is not None and dg.dim() == 4:
        dg = total(dg, 0)
    return Gradients(dq, dk, dg, db, None if dy is None else total(dy, 0), dread)


def _run_gradients(
    call: ScalarCall, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, A_log: Tensor | None,
    dt_bias: Tensor | None, do: Tensor, passed: Passed, read: Tensor | None, o: Tensor | None, long: Tensor | None,
    r: Gradients,
) -> None:  # fmt: skip
    p, t, s = call.plan, call.table, call.shape
    C, tiles, rows, d = p.chunk, t.chunks * s.HV, s.B * s.T, p.descriptors
    blocks = -(-s.K // p.grad_k)
    wide = blocks > 1
    mode = _gate_mode(g, A_log)
    dv, S, U, X, sc = passed.dv, passed.S, passed.U, passed.X, passed.sc
    dq, dk, dg, db, dy, dread = r.dq, r.dk, r.dg, r.dbeta, r.dy, r.dread
    bv, bk = p.grad_v, p.grad_k
    EF = part = None
    if wide:
        EF, part = _score_gradients(call, v, o, do, dv, U, sc, read, long)
    loop = d and wide
    inputs = (
        q, k, k if read is None else read, do, dv, _descriptor(q, rows, s.H * s.K, C, bk, d),
        _descriptor(k, rows, s.H * s.K, C, bk, d), k if read is None else _descriptor(read, rows, s.H * s.K, C, bk, d),
    )  # fmt: skip
    values = (_descriptor(do, rows, s.HV * s.V, C, bv, loop), _descriptor(dv, rows, s.HV * s.V, C, bv, loop))
    states = (S, _descriptor(S, tiles * s.V, s.K, bv, bk, d), X, _descriptor(X, tiles * s.V, s.K, bv, bk, d))
    gate = (sc, beta if g is None else g, beta if A_log is None else A_log, beta if dt_bias is None else dt_bias)
    results = (
        dq, _descriptor(dq, rows, s.HV * s.K, C, bk, d), dk, _descriptor(dk, rows, s.HV * s.K, C, bk, d),
        dk if dread is None else dread,
        dk if dread is None else _descriptor(dread, rows, s.HV * s.K, C, bk, d),
    )  # fmt: skip
    sums = (db if dg is None else dg, db, sc if dy is None else dy)
    index = (
        sc if long is None else long, sc if t.rows is None else t.rows, sc if t.cu is None else t.cu,
        sc if t.offsets is None else t.offsets, s.T, t.per_sequence, s.H, s.HV,
    )  # fmt: skip
    beta_inv = 1.0 / call.beta_scale if call.beta_scale else 0.0
    main: tuple[Any, ...]
    rest: tuple[Any, ...]
    if EF is not None:
        scores = (EF, _descriptor(EF, 2 * tiles * C, C, C, C, d))
        news = (U, _descriptor(U, tiles * s.V, C, bv, C, d))
        main = (*inputs, *values, *news, *states, *scores, *gate, *results)
        plain = (
            *inputs[:5], *inputs[:3], do, dv, U, U, S, S, X, X, EF, EF, *gate, *(x for x in results[::2] for _ in "pd")
        )  # fmt: skip
        rest = (*sums, sc if part is None else part, *index, rows, beta_inv)
    else:
        main = (*inputs, U, *states, *gate, *results)
        plain = (*inputs[:5], *inputs[:3], U, S, S, X, X, *gate, *(x for x in results[::2] for _ in "pd"))
        rest = (*sums, *index, call.scale**-2 if call.scale else 0.0, beta_inv)

    def run(tails: bool) -> Fixed:
        key = ("grad", tails, mode, dt_bias is not None, read is not None)
        fixed = call.launches.get(key)
        if fixed is None:
            meta = {
                "K": s.K, "V": s.V, "BK": bk, "BV": bv, "C": C, "NORM": call.norm, "DECAY": mode, "BIAS": key[3],
                "READ": key[4], "BEFORE": call.before, "VARLEN": t.varlen, "DESC": d and not tails, "TAILS": tails,
                "DOT": p.dot, **({"STAGES": p.grad.stages} if wide else {}), "PART": call.part,
            }  # fmt: skip
            fixed = call.launches[key] = (_wide_grad if wide else _grad).fix(meta, p.options[4])
        return fixed

    given = (q, k, do, g, beta, A_log, dt_bias, t.cu)
    whole = not d or t.varlen or s.T >= C
    if whole and chunk_groups.serve_gradients(call):
        whole = not chunk_groups.gradients(call, q, k, g, beta, A_log, dt_bias, do, passed, read, r)
    if whole:
        run(False)(blocks * tiles, (*main, *rest), given)
    if d and (t.varlen or s.T % C):
        run(True)(blocks * s.HV * t.sequences, (*plain, *rest), given)


def _score_gradients(
    call: ScalarCall, v: Tensor, o: Tensor | None, do: Tensor, dv: Tensor, U: Tensor, sc: Tensor,
    read: Tensor | None, long: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """E and F of all chunks, and what the norms take away."""
    p, t, s = call.plan, call.table, call.shape
    C, tiles = p.chunk, t.chunks * s.HV
    EF = U.new_empty(2 * tiles, C, C)
    rows = 4 if call.part == 1 else 3
    part = sc.new_empty(tiles, rows, C) if call.norm or rows == 4 else None
    key = ("scores", read is not None)
    run = call.launches.get(key)
    if run is None:
        meta = {
            "V": s.V, "BV": p.scores_v, "C": C, "NORM": call.norm, "READ": key[1], "BEFORE": call.before,
            "VARLEN": t.varlen, "DOT": p.dot, "PART": call.part,
        }  # fmt: skip
        run = call.launches[key] = _scores.fix(meta, p.options[5])
    run(
        tiles,
        (v, v if o is None else o, do, dv, U, sc, EF, sc if part is None else part, sc if long is None else long,
         sc if t.rows is None else t.rows, s.T, t.per_sequence, s.H, s.HV, call.scale**-2 if call.scale else 0.0),
        (v, do),
    )  # fmt: skip
    return EF, part
