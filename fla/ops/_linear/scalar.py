# SPDX-License-Identifier: MIT
"""Host side of the scalar-decay kernels: buffers, descriptors and launches. No autograd here."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fla.ops._common.device_index import ChunkTable, chunk_table, table_size
from fla.ops._common.launch import Launcher, descriptor
from fla.ops._common.policy import Chip, Launch, chip_of, pow2
from fla.ops._common.room import carve, like, room_for, total
from fla.ops._linear import groups
from fla.ops._linear.kernels import scalar_states as kernel
from fla.ops._linear.kernels.merge import merge_stretches
from fla.ops._linear.kernels.scalar_backward import scalar_both, scalar_thrice
from fla.ops._linear.kernels.scalar_decode import scalar_recurrent
from fla.ops._linear.kernels.scalar_grad import scalar_grad
from fla.ops._linear.kernels.scalar_out import scalar_out
from fla.ops._linear.kernels.scalar_reverse import scalar_reverse
from fla.ops._linear.kernels.scalar_scan import HEAD_DECAY, NO_DECAY, TOKEN_DECAY, scalar_scan, scalar_sums
from fla.ops._linear.policy import ScalarPlan, scalar_plan, time_marks, time_segments

_sums, _scan, _states = Launcher(scalar_sums), Launcher(scalar_scan), Launcher(kernel.scalar_states)
_merge, _out, _grad = Launcher(merge_stretches), Launcher(scalar_out), Launcher(scalar_grad)
_reverse, _recurrent = Launcher(scalar_reverse), Launcher(scalar_recurrent)
_both, _thrice = Launcher(scalar_both), Launcher(scalar_thrice)
_PLAIN = {"num_warps": 4, "num_stages": 1}
Kept = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class ScalarCall:
    """What does not change between forward and backward of one call. ``decay`` as DECAY of the kernels."""

    B: int
    T: int
    H: int
    K: int
    V: int
    plan: ScalarPlan
    chip: Chip
    table: ChunkTable
    scale: float
    decay: int
    v_first: bool
    segments: int = 1  # stretches that each sequence is cut into
    marks: int = 1  # stretches that the backward's scan in the order of time is cut into, where others are not

    @classmethod
    def make(
        cls, k: Tensor, v: Tensor, scale: float, decay: int, v_first: bool, cu_seqlens: Tensor | None,
        chip: Chip | None = None, plan: ScalarPlan | None = None, segments: int | None = None,
        marks: int | None = None,
    ) -> ScalarCall:  # fmt: skip
        """``cu_seqlens`` makes a call of packed sequences, which has no table yet; see `packed`."""
        chip = chip_of(k.device) if chip is None else chip
        packed = None if cu_seqlens is None else cu_seqlens.numel() - 1
        made = _call_of(k.shape, v.shape, k.dtype, chip, packed, scale, decay, v_first, plan)
        if segments is None and marks is None:
            return made
        segments = made.segments if segments is None else segments
        marks = made.marks if marks is None else marks
        return replace(made, segments=segments, marks=marks if segments == 1 else 1)

    def packed(self, table: ChunkTable) -> ScalarCall:
        """This call with the table of its sequences; what is written out of it stays in one place."""
        return replace(self, table=table)

    def on(self, cu_seqlens: Tensor | None) -> ScalarCall:
        if cu_seqlens is None:
            return self
        return self.packed(chunk_table(self.B, self.T, self.plan.chunk, cu_seqlens))

    @property
    def tail(self) -> bool:
        """Whether there may be chunks that are not full."""
        return self.table.varlen or self.T % self.plan.chunk != 0 or self.table.per_sequence == 0

    @property
    def tiles(self) -> int:
        return self.table.chunks * self.H

    @property
    def blocks(self) -> int:
        """Programs of a head and sequence in the passes over states."""
        return -(-self.V // self.plan.states_v) * -(-self.K // self.plan.block_k)

    def state_shape(self) -> tuple[int, ...]:
        return (self.table.sequences, self.H, *((self.V, self.K) if self.v_first else (self.K, self.V)))

    def rows(self, x: Tensor, width: int, block: int) -> Any:
        """A descriptor of ``x`` `[B, T, H, width]` for tiles of a chunk, or ``x`` where none is used."""
        if not self.plan.descriptors:
            return x
        return descriptor(x, self.B * self.T, self.H * width, self.plan.chunk, block)

    def states(self, x: Tensor, block_v: int, block_k: int) -> Any:
        if not self.plan.descriptors:
            return x
        return descriptor(x, self.tiles * self.V, self.K, block_v, block_k)

    def index(self, other: Tensor) -> tuple[Any, ...]:
        t = self.table
        return (
            other if t.cu is None else t.cu, other if t.offsets is None else t.offsets, self.T, t.per_sequence, self.H,
        )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _call_of(
    k: tuple[int, ...], v: tuple[int, ...], dtype: torch.dtype, chip: Chip, packed: int | None, scale: float,
    decay: int, v_first: bool, plan: ScalarPlan | None,
) -> ScalarCall:  # fmt: skip
    # One object for all calls of these sizes, because it keeps what is written out of them.
    B, T, H, K = k
    V = v[3]
    sequences = B if packed is None else packed
    if plan is None:
        plan = scalar_plan(chip, dtype, K, V, sequences * H)
    table = chunk_table(B, T, plan.chunk) if packed is None else table_size(T, plan.chunk, packed)
    chunks = table.chunks // max(sequences, 1)
    segments = time_segments(plan, chip, sequences * H, V, chunks)
    # Scores and states without decays are scaled where they are read, and float16 ends early.
    thrice = plan.thrice and decay != TOKEN_DECAY and scale != 0 and (decay != NO_DECAY or dtype != torch.float16)
    plan = plan if thrice == plan.thrice else replace(plan, thrice=thrice)
    marks = time_marks(plan, chip, sequences * H, chunks) if thrice and segments == 1 else 1
    return ScalarCall(B, T, H, K, V, plan, chip, table, scale, decay, v_first, segments, marks)


@dataclass(frozen=True)
class Decays:
    """Log decays of a call as the kernels read them: sums inside chunks or numbers per head, both None without."""

    sums: Tensor | None
    gamma: Tensor | None

    def args(self, other: Tensor) -> tuple[Tensor, Tensor]:
        return (other if self.sums is None else self.sums, other if self.gamma is None else self.gamma)


def decay_sums(call: ScalarCall, g: Tensor | None) -> Tensor | None:
    """Sums of log decays inside each chunk and their exponentials `[chunks * H, 3, C]`, fp32; see `scalar_sums`."""
    if g is None:
        return None
    t = call.table
    sums = torch.empty(call.tiles, 3, call.plan.chunk, dtype=torch.float32, device=g.device)
    # One width for all numbers of heads: each of its own would be compiled at a first call with so many.
    block = 32
    _sums(
        t.chunks * -(-call.H // block),
        (g, sums, sums if t.rows is None else t.rows, call.T, t.per_sequence, call.H, call.scale),
        {"C": call.plan.chunk, "BH": block, "VARLEN": t.varlen},
        _PLAIN,
        (g,),
    )
    return sums


def kept_states(call: ScalarCall, like: Tensor, sides: int) -> list[Tensor]:
    """Room for states or their gradients, a side each: `[chunks * H, V, K]` and factors of their rows, for float16."""
    part = ((call.tiles, call.V, call.K), like.dtype)
    if like.dtype != torch.float16:
        return [x for S in carve(room_for((part,) * sides, like), (part,) * sides) for x in (S, S)]
    factors = ((call.tiles, -(-call.K // call.plan.block_k), call.V), torch.float32)
    return carve(room_for((part, factors) * sides, like), (part, factors) * sides)


def _run_states(
    call: ScalarCall, decays: Decays, sides: int, split: int, *, q: Tensor | None = None, k: Tensor | None = None,
    v: Tensor | None = None, do: Tensor | None = None, S: Kept | None = None, X: Kept | None = None,
    h0: Tensor | None = None, ht: Tensor | None = None, dht: Tensor | None = None, dh0: Tensor | None = None,
    entry: Tensor | None = None, total: Tensor | None = None, back: Tensor | None = None,
) -> None:  # fmt: skip
    p, bk, bv = call.plan, call.plan.block_k, call.plan.states_v
    some = k if q is None else q
    assert some is not None
    fill = lambda x: some if x is None else x
    rows = lambda x, width, block: some if x is None else call.rows(x, width, block)
    kept = lambda x: (some,) * 3 if x is None else (x[0], call.states(x[0], bv, bk), x[1])
    parts = call.segments - 1 if split == kernel.SUMMARY else call.segments
    args = (
        fill(q), fill(k), fill(v), fill(do), rows(q, call.K, bk), rows(k, call.K, bk), rows(v, call.V, bv),
        rows(do, call.V, bv), *decays.args(some), *kept(S), *kept(X), fill(h0), fill(ht), fill(dht),
        fill(dh0), fill(entry), fill(total), fill(back), *call.index(some), int(h0 is not None), int(ht is not None),
        int(dht is not None), int(dh0 is not None), call.segments, parts, call.scale,
    )  # fmt: skip
    meta = {
        "K": call.K, "V": call.V, "BK": bk, "BV": bv, "C": p.chunk, "DECAY": call.decay, "SIDES": sides, "SPLIT": split,
        "VFIRST": call.v_first, "VARLEN": call.table.varlen, "DESC": p.descriptors,
        # The pipeliner of triton 3.7 cannot guard such a store in the loops that it makes for sm100.
        "DSTORE": call.chip.arch < 100, "DOT": p.dot, "STAGES": p.states.stages,
    }  # fmt: skip
    given = (q, k, v, do, decays.gamma, h0, ht, dht, dh0, call.table.cu)
    grid = call.blocks * call.H * parts * call.table.sequences
    _states(2 * grid if sides == kernel.BOTH else grid, args, meta, p.states.options(call.chip), given)


def _stretches(call: ScalarCall, segments: int, like: Tensor) -> Tensor:
    heads = call.table.sequences * segments * call.H
    return torch.empty(heads, call.V, call.K, dtype=torch.float32, device=like.device)


def marked(call: ScalarCall, like: Tensor) -> Tensor | None:
    """Room for the states in which the stretches of the backward begin."""
    return _stretches(call, call.marks, like) if call.marks > 1 else None


def _entries(call: ScalarCall, like: Tensor) -> tuple[Tensor, Tensor]:
    entry = _stretches(call, call.segments, like)
    return entry, torch.empty(entry.shape[0], dtype=torch.float32, device=like.device)


def _merged(call: ScalarCall, entry: Tensor, total: Tensor, reverse: bool) -> Tensor:
    size = call.K * call.V
    _merge(
        -(-size // 1024) * call.H * call.table.sequences, (entry, total, call.segments, call.H, size),
        {"KP": 1, "BS": 1024, "REVERSE": reverse}, _PLAIN, (),
    )  # fmt: skip
    return entry


def entries(call: ScalarCall, k: Tensor, v: Tensor, decays: Decays, h0: Tensor | None) -> Tensor | None:
    """States (transposed, fp32) in which the stretches of each sequence begin; None where none is split."""
    if call.segments == 1:
        return None
    entry, total = _entries(call, k)
    _run_states(call, decays, kernel.STATES, kernel.SUMMARY, k=k, v=v, h0=h0, entry=entry, total=total)
    return _merged(call, entry, total, False)


def _run_out(
    call: ScalarCall, q: Tensor, k: Tensor, v: Tensor, S: Kept, decays: Decays, inverse: Tensor | None, o: Tensor,
    reverse: bool,
) -> None:  # fmt: skip
    p, t = call.plan, call.table
    bv = p.out_v
    args = (
        q, k, v, *S, *decays.args(k), k if inverse is None else inverse, o, k if t.rows is None else t.rows, call.T,
        t.per_sequence, call.H, call.scale,
    )  # fmt: skip
    meta = {
        "K": call.K, "V": call.V, "BK": p.block_k, "BV": bv, "C": p.chunk, "DECAY": call.decay,
        "NORM": inverse is not None, "REVERSE": reverse, "VARLEN": t.varlen,
        "FULL": not t.varlen and not call.T % p.chunk and not call.K % p.block_k and not call.V % bv, "DOT": p.dot,
        "STAGES": p.out.stages,
    }  # fmt: skip
    _out(-(-call.V // bv) * call.tiles, args, meta, p.out.options(call.chip), (q, k, v, decays.gamma, t.cu))


def forward(
    call: ScalarCall, q: Tensor, k: Tensor, v: Tensor, decays: Decays, h0: Tensor | None, entry: Tensor | None,
    final: bool, inverse: Tensor | None = None, mark: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(o, final state or None); o is multiplied by ``inverse`` `[B, T, H]` (fp32) where given.

    ``mark``: write the states in which the `marks` stretches of the backward begin to ``entry``.
    """
    ht = torch.empty(call.state_shape(), dtype=torch.float32, device=k.device) if final else None
    o = like(v)
    p, t = call.plan, call.table
    if not p.one_scan:
        assert not mark
        kept = kept_states(call, k, 1)
        S = kept[0], kept[1]
        split = kernel.WHOLE if entry is None else kernel.STRETCH
        _run_states(call, decays, kernel.STATES, split, k=k, v=v, S=S, h0=h0, ht=ht, entry=entry)
        _run_out(call, q, k, v, S, decays, inverse, o, False)
        return o, ht
    if groups.serve(call, inverse) and groups.scan(call, q, k, v, decays, h0, entry, o, ht):
        return o, ht
    bk, bv = p.block_k, p.block_v
    args = (
        q, k, v, call.rows(q, call.K, bk), call.rows(k, call.K, bk), call.rows(v, call.V, bv),
        *decays.args(k),
        k if inverse is None else inverse, o, call.rows(o, call.V, bv), k if h0 is None else h0,
        k if ht is None else ht, k if entry is None else entry, *call.index(k), int(h0 is not None),
        int(ht is not None), call.marks if mark else call.segments, call.scale,
    )  # fmt: skip
    meta = {
        "K": call.K, "V": call.V, "BK": bk, "BV": bv, "C": p.chunk, "DECAY": call.decay, "NORM": inverse is not None,
        "SPLIT": 0 if entry is None else 2 if mark else 1, "VFIRST": call.v_first, "VARLEN": t.varlen,
        "DESC": p.descriptors, "DOT": p.dot, "DSTORE": call.chip.arch < 100,
        "STAGES": p.forward.stages,
    }  # fmt: skip
    grid = -(-call.V // bv) * call.H * call.segments * t.sequences
    _scan(grid, args, meta, p.forward.options(call.chip), (q, k, v, decays.gamma, h0, t.cu, ht))
    return o, ht


def exits(
    call: ScalarCall, q: Tensor, do: Tensor, decays: Decays, dht: Tensor | None, entry: Tensor | None
) -> Tensor | None:
    """Gradients of the states in which stretches end, which are split where the states are."""
    if entry is None or call.segments == 1:
        return None
    back, total = _entries(call, q)
    _run_states(call, decays, kernel.GRADIENTS, kernel.SUMMARY, q=q, do=do, dht=dht, back=back, total=total)
    return _merged(call, back, total, True)


def states(
    call: ScalarCall, q: Tensor, k: Tensor, v: Tensor, do: Tensor, decays: Decays, h0: Tensor | None,
    dht: Tensor | None, dh0: Tensor | None, entry: Tensor | None,
) -> tuple[Kept, Kept, Tensor]:  # fmt: skip
    """The state before each chunk, its gradient after it (see `kept_states`) and dv; fills ``dh0`` where given."""
    p = call.plan
    back = exits(call, q, do, decays, dht, entry)
    split = kernel.WHOLE if back is None else kernel.STRETCH
    kept = kept_states(call, k, 2)
    S, X = (kept[0], kept[1]), (kept[2], kept[3])
    dv = like(v)
    if p.both:
        _run_both(call, q, k, v, do, decays, h0, dht, dh0, entry, back, S, X, dv)
    elif p.dv_scan:
        _run_states(call, decays, kernel.STATES, split, k=k, v=v, S=S, h0=h0, entry=entry)
        _run_reverse(call, q, k, do, decays, dht, back, dv, X, dh0)
    else:
        _run_states(
            call, decays, kernel.BOTH, split, q=q, k=k, v=v, do=do, S=S, X=X, h0=h0, dht=dht, dh0=dh0, entry=entry,
            back=back,
        )  # fmt: skip
        _run_out(call, k, q, do, X, decays, None, dv, True)
    return S, X, dv


def _run_both(
    call: ScalarCall, q: Tensor, k: Tensor, v: Tensor, do: Tensor, decays: Decays, h0: Tensor | None,
    dht: Tensor | None, dh0: Tensor | None, entry: Tensor | None, back: Tensor | None, S: Kept, X: Kept,
    dv: Tensor,
) -> None:  # fmt: skip
    p, t, bk, bv, sv = call.plan, call.table, call.plan.block_k, call.plan.block_v, call.plan.both_v
    fill = lambda x: k if x is None else x
    args = (
        q, k, v, do, call.rows(q, call.K, bk), call.rows(k, call.K, bk), call.rows(v, call.V, sv),
        call.rows(do, call.V, bv), *decays.args(k), dv, call.rows(dv, call.V, bv), S[0], call.states(S[0], sv, bk),
        S[1], X[0], call.states(X[0], bv, bk), X[1], fill(h0), fill(dht), fill(dh0), fill(entry), fill(back),
        *call.index(k), t.sequences, int(h0 is not None), int(dht is not None), int(dh0 is not None), call.segments,
        call.scale,
    )  # fmt: skip
    meta = {
        "K": call.K, "V": call.V, "BK": bk, "BV": bv, "SV": sv, "C": p.chunk, "DECAY": call.decay,
        "SPLIT": int(back is not None), "VFIRST": call.v_first, "VARLEN": t.varlen, "DESC": p.descriptors,
        "DOT": p.dot, "STAGES": p.reverse.stages, "STATE_STAGES": p.both_stages,
    }  # fmt: skip
    grid = (-(-call.V // bv) + -(-call.V // sv)) * call.H * call.segments * t.sequences
    _both(grid, args, meta, p.reverse.options(call.chip), (q, k, v, do, decays.gamma, h0, dht, dh0, t.cu))


def thrice(
    call: ScalarCall, q: Tensor, k: Tensor, v: Tensor, do: Tensor, decays: Decays, h0: Tensor | None,
    dht: Tensor | None, dh0: Tensor | None, entry: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv) by three scans, for decays that have no gradient; fills ``dh0`` where given."""
    p, t = call.plan, call.table
    back = exits(call, q, do, decays, dht, entry)
    dq, dk, dv = like(q), like(k), like(v)
    if groups.serve_thrice(call) and groups.thrice(call, q, k, v, do, decays, h0, dht, dh0, entry, dq, dk, dv):
        return dq, dk, dv
    bk, bv = p.block_k, min(pow2(call.V, 32), 128)
    ck, cv = min(p.block_v, bk), min(p.block_v, bv)
    fill = lambda x: k if x is None else x
    args = (
        q, k, v, do, call.rows(q, call.K, bk), call.rows(k, call.K, bk), call.rows(v, call.V, bv),
        call.rows(do, call.V, bv), call.rows(q, call.K, ck), call.rows(k, call.K, ck),
        call.rows(do, call.V, cv),
        *decays.args(k), dq, call.rows(dq, call.K, ck), dk, call.rows(dk, call.K, ck), dv, call.rows(dv,
        call.V, cv),
        fill(h0), fill(dht), fill(dh0), fill(entry), fill(back), *call.index(k), t.sequences, int(h0 is not None),
        int(dht is not None), int(dh0 is not None), call.segments, call.segments if back is not None else call.marks,
        call.scale,
    )  # fmt: skip
    meta = {
        "K": call.K, "V": call.V, "BK": bk, "BV": bv, "CK": ck, "CV": cv, "C": p.chunk, "DECAY": call.decay,
        "SPLITX": int(back is not None), "SPLITS": int(entry is not None), "VFIRST": call.v_first,
        "VARLEN": t.varlen, "DESC": p.descriptors, "DOT": p.dot, "DSTORE": call.chip.arch < 100,
        "STAGES": p.reverse.stages,
    }  # fmt: skip
    nk, nv = -(-call.K // ck), -(-call.V // cv)
    heads = call.H * t.sequences
    grid = heads * ((nk + nv) * call.segments + nk * (call.segments if back is not None else call.marks))
    _thrice(grid, args, meta, p.reverse.options(call.chip), (q, k, v, do, decays.gamma, h0, dht, dh0, t.cu))
    return dq, dk, dv


def _run_reverse(
    call: ScalarCall, q: Tensor, k: Tensor, do: Tensor, decays: Decays, dht: Tensor | None, entry: Tensor | None,
    dv: Tensor, X: Kept, dh0: Tensor | None,
) -> None:  # fmt: skip
    p, bk, bv = call.plan, call.plan.block_k, call.plan.block_v
    args = (
        q, k, do, call.rows(q, call.K, bk), call.rows(k, call.K, bk), call.rows(do, call.V, bv), *decays.args(k), dv,
        call.rows(dv, call.V, bv), X[0], call.states(X[0], bv, bk), X[1], k if dht is None else dht,
        k if dh0 is None else dh0, k if entry is None else entry, *call.index(k), int(dht is not None),
        int(dh0 is not None), call.segments, call.scale,
    )  # fmt: skip
    meta = {
        "K": call.K, "V": call.V, "BK": bk, "BV": bv, "C": p.chunk, "DECAY": call.decay, "SPLIT": entry is not None,
        "VFIRST": call.v_first, "VARLEN": call.table.varlen, "DESC": p.descriptors, "DOT": p.dot,
        "STAGES": p.reverse.stages,
    }  # fmt: skip
    given = (q, k, do, decays.gamma, dht, dh0, call.table.cu)
    grid = -(-call.V // bv) * call.H * call.segments * call.table.sequences
    _reverse(grid, args, meta, p.reverse.options(call.chip), given)


def gradients(
    call: ScalarCall, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, decays: Decays, do: Tensor, S: Kept,
    X: Kept, norm: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(dq, dk, dg in g's dtype or None).

    ``norm``: gradient of the denominators `[B, T, H]`, sums of keys before and of weighted queries after each chunk.
    """
    p, t, bk, bv = call.plan, call.table, call.plan.grad_k, call.plan.grad_v
    blocks, rows = -(-call.K // bk), call.B * call.T
    dq, dk = like(q), like(k)
    dg = None
    if g is not None:
        # Shares of the blocks stay fp32; what is final is written in the caller's dtype at once.
        dg = like(g) if blocks == 1 else torch.empty((blocks, *g.shape), dtype=torch.float32, device=g.device)
    main = (
        q, k, v, do, call.rows(q, call.K, bk), call.rows(k, call.K, bk), S[0], call.states(S[0], bv, bk), S[1],
        X[0], call.states(X[0], bv, bk), X[1],
    )  # fmt: skip
    gates = (*decays.args(k), k if g is None else g, *((k, k, k) if norm is None else norm))
    out = (dq, call.rows(dq, call.K, bk), dk, call.rows(dk, call.K, bk))
    rest = (k if dg is None else dg, k if t.rows is None else t.rows, *call.index(k), rows, call.scale)
    meta = {
        "K": call.K, "V": call.V, "BK": bk, "BV": bv, "C": p.chunk, "SK": p.block_k, "DECAY": call.decay,
        "NORM": norm is not None, "VARLEN": t.varlen, "DESC": p.descriptors, "TAILS": False, "DOT": p.dot,
    }  # fmt: skip
    given = (q, k, v, do, decays.gamma, g, t.cu)
    options = p.grad.options(call.chip)
    if not p.descriptors or t.varlen or p.chunk <= call.T:
        _grad(blocks * call.tiles, (*main, *gates, *out, *rest), meta, options, given)
    if p.descriptors and (t.varlen or call.T % p.chunk):
        args = (q, k, v, do, q, k, S[0], S[0], S[1], X[0], X[0], X[1], *gates, dq, dq, dk, dk, *rest)
        meta = {**meta, "DESC": False, "TAILS": True}
        _grad(blocks * call.H * t.sequences, args, meta, options, given)
    if dg is not None and g is not None and blocks > 1:
        dg = total(dg, 0).to(g.dtype)
    return dq, dk, dg


def decode_launch(K: int, v_first: bool) -> tuple[int, Launch]:
    """Columns of V in a program and its compiler options; the reasons are those of `fla.ops._delta.decode`."""
    if v_first:
        return max(4, min(16, 1024 // pow2(K))), Launch(1)
    return (32, Launch(2)) if K > 64 else (32, Launch(1))


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor | None, gamma: Tensor | None, scale: float, state: Tensor | None,
    final: bool, reverse: bool, v_first: bool, cu_seqlens: Tensor | None, z: Tensor | None = None,
    zt: Tensor | None = None, eps: float = 0.0,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Token by token in one launch: outputs and the final state (fp32). All tensors are contiguous.

    With ``zt`` outputs are divided by their normaliser plus ``eps``; the sum of keys begins with ``z`` and goes there.
    """
    B, T, H, K = k.shape
    V = v.shape[3]
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    o = like(v)
    ht = torch.empty((N, H, *((V, K) if v_first else (K, V))), dtype=torch.float32, device=k.device) if final else None
    bv, launch = decode_launch(K, v_first)
    decay = TOKEN_DECAY if g is not None else NO_DECAY if gamma is None else HEAD_DECAY
    args = (
        q, k, v, k if g is None else g, k if gamma is None else gamma, k if state is None else state,
        k if ht is None else ht, o, k if cu_seqlens is None else cu_seqlens, T, H, int(state is not None),
        int(ht is not None), scale, k if z is None else z, k if zt is None else zt, int(z is not None), eps,
    )  # fmt: skip
    meta = {
        "K": K, "V": V, "BK": pow2(K), "BV": bv, "DECAY": decay, "NORM": zt is not None, "REVERSE": reverse,
        "VFIRST": v_first, "VARLEN": cu_seqlens is not None,
    }  # fmt: skip
    _recurrent(
        -(-V // bv) * H * N,
        args,
        meta,
        launch.options(chip_of(k.device)),
        (q, k, v, g, gamma, state, cu_seqlens, ht, z),
    )
    return o, ht
