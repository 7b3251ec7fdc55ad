# SPDX-License-Identifier: MIT
"""Buffers and launches of one call of the linear engine with a decay per key channel. No autograd here."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fla.ops._common.device_index import ChunkTable, chunk_table, known_table, table_size
from fla.ops._common.launch import Fixed
from fla.ops._common.policy import Chip, Launch, chip_of
from fla.ops._common.room import Parts, carve, like, room_for, total
from fla.ops._common.vector_launch import ONES_TYPES, TL_TYPES, NamedLauncher, aligned, constant, matrix_of, rows_of
from fla.ops._linear.kernels import vector_scan as kernel
from fla.ops._linear.kernels.merge import merge_stretches
from fla.ops._linear.kernels.vector_grad import vector_grad
from fla.ops._linear.kernels.vector_prep import vector_prep
from fla.ops._linear.vector_policy import VectorPlan, time_segments, vector_plan

_prep, _scan, _merge = (
    NamedLauncher(vector_prep),
    NamedLauncher(kernel.vector_scan),
    NamedLauncher(merge_stretches),
)
_grad = NamedLauncher(vector_grad)


Kept = tuple[Tensor, Tensor | None]
_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


@constant
def sum_matrices(chunk: int, exclusive: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """0/1 matrices `[2 + log2(chunk), chunk, chunk]` whose products with gates are sums over tokens.

    0: up to and with the token (``exclusive``: without it); 1: after it; then the levels of the tree: blocks of chunk,
    chunk / 2, .. 2 tokens are split in the middle; a token of the second half needs the decay from the middle up to
    itself, one of the first half the decay after itself up to the middle.
    """
    i = torch.arange(chunk, device=device)[:, None]
    t = torch.arange(chunk, device=device)[None, :]
    upto = t < i if exclusive else t <= i
    out = [upto, t > i]
    half = chunk // 2
    while half:
        mid = i // (2 * half) * (2 * half) + half
        out.append(((i >= mid) & (t >= mid) & upto) | ((i < mid) & (t > i) & (t < mid)))
        half //= 2
    return torch.stack(out).to(dtype)


def _dims(p: VectorPlan, K: int, V: int, varlen: bool, ragged: bool) -> dict[str, Any]:
    return {
        "C": p.chunk, "K": K, "KP": p.kp, "V": V, "VP": p.vp, "LEVELS": p.chunk.bit_length() - 1, "PREC": p.prec,
        "VARLEN": varlen, "ROWS": ragged,
    }  # fmt: skip


@functools.lru_cache(maxsize=512)
def _fixed_prep(
    p: VectorPlan, chip: Chip, K: int, dtype: torch.dtype, read: bool, bonus: bool, gprec: str, gtma: bool,
    varlen: bool, ragged: bool,
) -> Fixed:  # fmt: skip
    launch = p.prep
    if p.tma and not gtma:
        # Gates in float32: one stage less, so that two programs still share a multiprocessor.
        launch = dataclasses.replace(launch, stages=min(launch.stages, 2))
    meta = {
        "KB": p.kb, "READ": read, "BONUS": bonus, "FAST": p.fast, "DT": TL_TYPES[dtype], "SD": TL_TYPES[p.score],
        "GPREC": gprec, "TMA": p.tma, "GTMA": gtma, "STAGES": launch.stages, **_dims(p, K, 0, varlen, ragged),
    }  # fmt: skip
    return _prep.fix(meta, launch.options(chip))


@functools.lru_cache(maxsize=512)
def _fixed_scan(
    p: VectorPlan, chip: Chip, K: int, V: int, dtype: torch.dtype, out: torch.dtype | None, save: bool, init: bool,
    final: bool, split: int, reverse: bool, v_first: bool, otma: bool, varlen: bool, ragged: bool,
) -> Fixed:  # fmt: skip
    launch = p.save if out is None else p.scan
    meta = {
        "BV": p.bv_save if out is None else p.bv, "OUT": out is not None, "SAVE": save, "INIT": init, "FINAL": final,
        "SPLIT": split, "REVERSE": reverse, "VFIRST": v_first, "DT": TL_TYPES[dtype], "OT": TL_TYPES[out or dtype],
        "TMA": p.tma, "OTMA": otma, "STAGES": launch.stages, **_dims(p, K, V, varlen, ragged),
    }  # fmt: skip
    return _scan.fix(meta, launch.options(chip))


@functools.lru_cache(maxsize=512)
def _fixed_grad(
    p: VectorPlan, chip: Chip, K: int, V: int, gkb: int, dq: torch.dtype, dk: torch.dtype, dg: torch.dtype, full: bool,
    soft: bool, bonus: bool, gprec: str, tma: bool, gtma: bool, varlen: bool, ragged: bool,
) -> Fixed:  # fmt: skip
    meta = {
        "KB": gkb, "VB": p.vb, "FULL": full, "SOFT": soft, "BONUS": bonus, "FAST": p.fast, "SD": TL_TYPES[p.gscore],
        "GPREC": gprec, "TMA": tma, "GTMA": gtma, "QT": TL_TYPES[dq], "KT": TL_TYPES[dk],
        "GT": TL_TYPES[dg if full else dq], **_dims(p, K, V, varlen, ragged),
    }  # fmt: skip
    launch = Launch(8) if gkb > p.gkb else p.grad
    return _grad.fix(meta, launch.options(chip))


@dataclass(frozen=True, eq=False)
class VectorCall:
    """What calls of the same sizes and flags have in common: ``k`` and ``v`` as the kernels see them."""

    k: tuple[int, ...]
    v: tuple[int, ...]
    plan: VectorPlan
    chip: Chip
    table: ChunkTable  # of packed sequences: their numbers only
    packed: bool
    scale: float
    v_first: bool
    segments: int  # stretches that each sequence is cut into

    @classmethod
    def make(
        cls, k: Tensor, v: Tensor, scale: float, v_first: bool, cu_seqlens: Tensor | None,
        plan: VectorPlan | None = None, segments: int | None = None,
    ) -> VectorCall:  # fmt: skip
        """``plan`` and ``segments`` fix what the policy chooses, for checks. k and v begin on 16 bytes."""
        packed = None if cu_seqlens is None else cu_seqlens.numel() - 1
        return _call_of(k.shape, v.shape, k.dtype, chip_of(k.device), packed, scale, v_first, plan, segments)

    @property
    def ragged(self) -> bool:
        return self.packed or self.k[1] % self.plan.chunk != 0


@functools.lru_cache(maxsize=256)
def _call_of(
    k: tuple[int, ...], v: tuple[int, ...], dtype: torch.dtype, chip: Chip, packed: int | None, scale: float,
    v_first: bool, plan: VectorPlan | None, segments: int | None,
) -> VectorCall:  # fmt: skip
    B, T, H, K = k
    sequences = B if packed is None else packed
    if plan is None:
        # Descriptors address every head's tile: heads on 16 bytes too.
        fits = K * dtype.itemsize % 16 == 0 and v[3] * dtype.itemsize % 16 == 0
        plan = vector_plan(chip, _NAMES[dtype], K, v[3], heads=sequences * H, aligned=fits)
    table = chunk_table(B, T, plan.chunk) if packed is None else table_size(T, plan.chunk, packed)
    if segments is None:
        segments = time_segments(plan, chip, sequences * H, table.chunks // max(sequences, 1))
    return VectorCall(k, v, plan, chip, table, packed is not None, scale, v_first, segments)


class Work:
    """One call: ``S_t = diag(e^g) S_{t-1} + k v^T``, ``o = scale q S_t``, or with the bonus ``u``
    ``o = scale q (S_{t-1} + diag(u) k v^T)``. Buffers are indexed by tile = chunk * heads + head."""

    tiles: Tensor
    mats: Tensor | None
    weights: Tensor | None  # of mats, in float16
    decay: Tensor

    def __init__(
        self, call: VectorCall, q: Tensor | None, k: Tensor, v: Tensor, g: Tensor, u: Tensor | None,
        cu: Tensor | None, rows: Tensor | None = None, offsets: Tensor | None = None,
    ) -> None:  # fmt: skip
        """``rows`` and ``offsets`` are those of `ChunkTable`, where ``cu`` has been gone through before."""
        self.call, self.q, self.k, self.v, self.g, self.u = call, q, k, v, g, u
        self.scale, self.v_first, self.plan, self.chip = call.scale, call.v_first, call.plan, call.chip
        self.B, self.T, self.H, self.K = call.k
        self.V, self.segments = call.v[3], call.segments
        plan = self.plan
        if cu is None:
            self.table = call.table
        elif rows is None or offsets is None:
            self.table = chunk_table(self.B, self.T, plan.chunk, cu)
        else:
            self.table = known_table(self.T, plan.chunk, cu, rows, offsets)
        self.N = self.table.sequences
        self.tiles_n = max(self.table.chunks, 1) * self.H
        self.ragged = call.ragged
        self.raw = g.dtype == torch.bfloat16 and plan.gscore == "bf16"
        self.gtma = plan.tma and g.element_size() == 2 and (g.is_meta or aligned(g))
        self.half = k.dtype == torch.float16
        self.index = (self.table.cu, self.table.offsets, self.T, self.table.per_sequence, self.H)
        self.rows = (self.table.varlen, self.ragged)

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.k.dtype, device=self.k.device)

    def state(self) -> Tensor:
        a, b = (self.V, self.K) if self.v_first else (self.K, self.V)
        return self.new(self.N, self.H, a, b, dtype=torch.float32)

    def ones(self, dtype: torch.dtype) -> Tensor:
        return sum_matrices(self.plan.chunk, self.u is not None, dtype, self.k.device)

    @property
    def prepared(self) -> Parts:
        p, n, C = self.plan, self.tiles_n, self.plan.chunk
        tiles, decay = ((n * 2 * C, p.kp), self.k.dtype), ((n, p.kp), torch.float32)
        if self.q is None:
            return tiles, decay
        mats = ((n * C, C), self.k.dtype)
        return (tiles, decay, mats, ((n,), torch.float32)) if self.half else (tiles, decay, mats)

    def carve(self, room: Tensor) -> None:
        """Take what `prep` fills or has filled."""
        self.room = room
        self.tiles, self.decay, *rest = carve(room, self.prepared)
        self.mats = rest[0] if rest else None
        self.weights = rest[1] if len(rest) > 1 else None

    def prep(self) -> None:
        """Tiles, scores and decays of all chunks; without q only what the state needs."""
        p, C = self.plan, self.plan.chunk
        read = self.q is not None
        self.carve(room_for(self.prepared, self.k))
        gprec = "raw" if self.raw else p.gprec
        block = (C, p.kb)
        per = max(1, min(p.per, self.table.chunks * self.H // (4 * self.chip.sms)))
        fixed = _fixed_prep(
            p, self.chip, self.K, self.k.dtype, read, self.u is not None, gprec, self.gtma, *self.rows
        )  # fmt: skip
        fixed(
            self.H * -(-self.table.chunks // per),
            (
                self.decay, None if self.q is None else rows_of(self.q, block, p.tma), rows_of(self.k, block, p.tma),
                rows_of(self.g, block, self.gtma), self.u, self.table.rows, self.ones(ONES_TYPES[gprec]),
                matrix_of(self.tiles, block, p.tma),
                None if self.mats is None else matrix_of(self.mats, (C, C), p.tma), self.weights, self.T,
                self.table.per_sequence, self.H, self.table.chunks, per, self.scale,
            ),
            (self.q, self.k, self.g, self.u),
        )  # fmt: skip

    def _run(
        self, x: Tensor, *, reverse: bool, o: Tensor | None, states: Kept | None, h0: Tensor | None,
        ht: Tensor | None, entry: Tensor | None, total: Tensor | None,
    ) -> None:  # fmt: skip
        p, C = self.plan, self.plan.chunk
        bv = p.bv_save if o is None else p.bv
        split = kernel.SUMMARY if total is not None else kernel.WHOLE if entry is None else kernel.STRETCH
        parts = self.segments - 1 if split == kernel.SUMMARY else self.segments if split else 1
        otma = p.tma and not self.ragged and p.vp == self.V and o is not None and o.dtype == x.dtype
        fixed = _fixed_scan(
            p, self.chip, self.K, self.V, self.k.dtype, None if o is None else o.dtype, states is not None,
            h0 is not None, ht is not None, split, reverse, self.v_first, otma, *self.rows,
        )  # fmt: skip
        fixed(
            p.vp // bv * self.H * parts * self.N,
            (
                self.decay, matrix_of(self.tiles, (C, p.kp), p.tma),
                None if o is None or self.mats is None else matrix_of(self.mats, (C, C), p.tma), self.weights,
                rows_of(x, (C, bv), p.tma), None if o is None else rows_of(o, (C, bv), otma),
                *((None, None) if states is None else (matrix_of(states[0], (bv, p.kp), p.tma), states[1])), h0, ht,
                entry, total, *self.index, self.segments if split else 1, parts,
            ),
            (x, o, h0, ht, self.table.cu),
        )  # fmt: skip

    def _entries(self, x: Tensor, h0: Tensor | None, reverse: bool) -> Tensor | None:
        """States (transposed, padded, fp32) in which the stretches of each sequence begin; None where none is split."""
        if self.segments == 1:
            return None
        p, slots = self.plan, self.N * self.segments * self.H
        entry = self.new(slots, p.vp, p.kp, dtype=torch.float32)
        total = self.new(slots, p.kp, dtype=torch.float32)
        self._run(x, reverse=reverse, o=None, states=None, h0=h0, ht=None, entry=entry, total=total)
        size = p.vp * p.kp
        _merge(
            -(-size // 1024) * self.H * self.N, (entry, total, self.segments, self.H, size),
            {"KP": p.kp, "BS": 1024, "REVERSE": reverse}, {"num_warps": 4, "num_stages": 1}, (),
        )  # fmt: skip
        return entry

    def scan(
        self, x: Tensor, h0: Tensor | None, *, reverse: bool = False, out: bool = True, final: Tensor | None = None,
        save: bool = False, entry: Tensor | None = None,
    ) -> tuple[Tensor | None, Kept | None, Tensor | None]:  # fmt: skip
        """(outputs, states before each chunk `[tiles * vp, kp]` and in float16 the factors of their rows, entries of
        the stretches), forward over ``x`` = v or in reverse over ``x`` = do; fills ``final``."""
        o = like(x) if out else None
        states: Kept | None = None
        if save:
            rows = self.tiles_n * self.plan.vp
            states = self.new(rows, self.plan.kp), self.new(rows, dtype=torch.float32) if self.half else None
        if entry is None:
            entry = self._entries(x, h0, reverse)
        self._run(x, reverse=reverse, o=o, states=states, h0=h0, ht=final, entry=entry, total=None)
        return o, states, entry

    def grad(
        self, do: Tensor, states: Kept, exits: Kept | None, dtype: torch.dtype | None = None, soft: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """(dq, dk, dg, du in fp32); only dq without ``exits``; ``soft``: its softmax over channels."""
        p, full = self.plan, exits is not None
        gkb = p.kp if soft else p.gkb
        dq = like(self.k, dtype=dtype)
        dk = like(self.k) if full else None
        dg = like(self.g) if full else None
        bonus = full and self.u is not None
        du = self.new(self.table.chunks, self.H, self.K, dtype=torch.float32) if bonus else None
        gprec = "raw" if self.raw else p.prec
        block = (p.chunk, gkb)
        tma = p.tma and not self.ragged and p.kp == self.K and dq.dtype == self.k.dtype
        gtma = tma and dg is not None and dg.element_size() == 2
        fixed = _fixed_grad(
            p, self.chip, self.K, self.V, gkb, dq.dtype, self.k.dtype, self.g.dtype, full, soft, self.u is not None,
            gprec, tma, gtma, *self.rows,
        )  # fmt: skip
        fixed(
            p.kp // gkb * self.H * self.table.chunks,
            (
                self.decay, self.q if full else None, self.k, self.g, self.u, self.v, do, states[0],
                None if exits is None else exits[0], states[1], None if exits is None else exits[1],
                self.ones(torch.bfloat16 if p.gscore == "bf16" else torch.float32), self.table.rows,
                rows_of(dq, block, tma), None if dk is None else rows_of(dk, block, tma),
                None if dg is None else rows_of(dg, block, gtma), du, self.T, self.table.per_sequence, self.H,
                self.scale,
            ),
            (self.q, self.k, self.g, self.u, self.v, do, dq),
        )  # fmt: skip
        return dq, dk, dg, None if du is None else total(du, 0)
