# SPDX-License-Identifier: MIT
"""Buffers and launches of one call of the vector-decay chunk engine (KDA)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import triton
from torch import Tensor

from fla.ops._common.device_index import ChunkTable, chunk_table
from fla.ops._common.launch import Fixed, Launcher
from fla.ops._common.parts import sum_parts
from fla.ops._common.policy import Chip, Launch, chip_of, has_descriptors, pow2
from fla.ops._common.room import Parts, carve, like, room_for, total
from fla.ops._delta import vector_groups
from fla.ops._delta.vector_launch import (
    ONES_TYPES,
    TL_TYPES,
    TORCH_TYPES,
    matrix_of,
    one_matrices,
    rows_of,
    run_any,
    run_grad,
    run_grad_exact,
    run_merge,
    run_prep,
    run_scan,
    run_scan_bwd,
    run_scores,
)
from fla.ops._delta.vector_policy import VectorPlan, plan

# Tokens below which the exact form does every chunk: its scores of a token with itself are not rounded twice, and over
# few tokens nothing averages out.
FEW = 16


@dataclass(frozen=True)
class VectorCall:
    """What is fixed about a call.

    Attributes:
        scale: factor of q.
        gate: 0: ``g`` is the log decay; 1: ``-exp(A_log) softplus(g + dt_bias)``; 2: bounded by ``lower``.
        lower: bound of gate 2 in nat.
        beta: 0: ``beta`` as given; 1: sigmoid; 2: twice the sigmoid.
        norm: q and k are L2-normed in the op.
        exact: any gate is allowed; otherwise all log decays lie in [-5, 0].
        v_first: states are `[N, HV, V, K]`.
        uncovered: rows may lie outside every sequence; outputs and gradients are 0 there.
        keep: save states and new values for the backward instead of computing them again.
    """

    scale: float
    gate: int = 0
    lower: float = 0.0
    beta: int = 0
    norm: bool = False
    exact: bool = True
    v_first: bool = False
    uncovered: bool = False
    keep: bool = False
    part: int = 0  # of two forms, which: 1 that in float16, 2 that in float32; 0: there is one form


@dataclass
class Setup:
    """What calls of the same sizes, types and flags have in common."""

    plan: VectorPlan
    ragged: bool
    gtma: bool
    btma: bool
    erase: bool  # a strength per key channel multiplies the read key alone; the value's has been multiplied in
    raw: bool  # bf16 decays are summed as they are, without rounding
    tree: VectorPlan | None  # of the kernels for gates of any strength, where such may come
    some: bool  # these only do the chunks that have strong gates; the others take the kernels of bounded gates
    parts: int  # in which the gradient kernels leave sums over channels
    common: dict[str, Any]
    dims: dict[str, Any]
    gates: dict[str, Any]
    launches: dict[Any, Fixed] = field(default_factory=dict)


@functools.lru_cache(maxsize=256)
def _setup(
    call: VectorCall, q: tuple[int, ...], v: tuple[int, ...], dtypes: tuple[torch.dtype, ...], erase: bool, rate: bool,
    bias: bool, chip: Chip, sequences: int, varlen: bool, aligned: bool, g_aligned: bool, beta_aligned: bool,
) -> Setup:  # fmt: skip
    dtype, g, beta = dtypes
    T, K, H, V = q[1], q[3], v[2], v[3]
    work = torch.float32 if call.part == 2 else dtype
    some = call.exact and work != torch.float32 and T >= FEW
    kind: dict[str, Any] = {"sequences": sequences, "heads": H, "length": T}
    kind.update(varlen=varlen, gated=call.gate > 0, erase=erase)
    ragged = varlen or T % 64 != 0
    whole = not ragged and q[2] == H and pow2(K, 32) == K
    kind.update(light=dtype == g == torch.bfloat16 and whole and not erase)
    # Descriptors address every head's tile: bases and heads on 16 bytes.
    aligned = aligned and K * dtype.itemsize % 16 == 0 and V * dtype.itemsize % 16 == 0 and has_descriptors()
    kind.update(normed=call.norm or call.part > 0, aligned=aligned)
    name = str(dtype).removeprefix("torch.")
    p = plan(chip, name, K, V, exact=call.exact and not some, **kind)
    tree = plan(chip, name, K, V, exact=True, **kind) if call.exact else None
    parts = p.kp // min(p.gkb, p.gkb if tree is None else tree.gkb)
    if tree is not None:
        tree = replace(tree, gkb=p.kp // parts)
    if call.part == 2:
        # The parts of sums that both forms write are the same.
        kind.update(normed=False, aligned=False)
        long = plan(chip, "float32", K, V, exact=call.exact, **kind)
        p = replace(long, segments=1, gkb=p.kp // parts, kp=p.kp, vp=p.vp)
        tree = p if call.exact else None
    gtma = p.tma and g.itemsize == 2 and g_aligned and K * 2 % 16 == 0
    btma = erase and p.tma and beta.itemsize == 2 and beta_aligned and K * 2 % 16 == 0
    return Setup(
        plan=p,
        ragged=ragged,
        gtma=gtma,
        btma=btma,
        erase=erase,
        raw=call.gate == 0 and g == torch.bfloat16 and p.gscore == "bf16",
        tree=tree,
        some=some,
        parts=parts,
        common={
            "DT": TL_TYPES[work],
            "IO": TL_TYPES[dtype],
            "PREC": p.prec,
            "VARLEN": varlen,
            "ROWS": ragged,
            "TMA": p.tma,
            "PART": call.part,
        },
        dims={"K": K, "KP": p.kp, "V": V, "VP": p.vp},
        gates={
            "GATE": call.gate,
            "RATE": call.gate > 0 and rate,
            "BIAS": call.gate > 0 and bias,
            "BETA": call.beta,
            "NORM": call.norm,
            "GTMA": gtma,
            "ERASE": erase,
            "BTMA": btma,
        },
    )


@dataclass
class Gradients:
    """Buffers of the gradient kernel: per value head, and in parts where several programs share a sum."""

    dq: Tensor
    dk: Tensor
    dg: Tensor
    db: Tensor
    da: Tensor | None
    dbias: Tensor | None


class Work:
    """Buffers and launches of one call. Buffers are indexed by tile = 64-token chunk * heads + head."""

    def __init__(
        self,
        call: VectorCall,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        a_log: Tensor | None,
        dt_bias: Tensor | None,
        cu_seqlens: Tensor | None,
        table: ChunkTable | None = None,
        long: Tensor | None = None,
    ) -> None:
        self.call, self.q, self.k, self.v, self.g, self.beta = call, q, k, v, g, beta
        self.dtype = torch.float32 if call.part == 2 else q.dtype  # of everything between inputs and outputs
        self.long = long  # says which of two forms runs, see `kernels.common`
        self.a_log, self.dt_bias = a_log, dt_bias
        self.B, self.T, self.HK, self.K = q.shape
        self.H, self.V = v.shape[2], v.shape[3]
        self.chip: Chip = chip_of(q.device)
        self.table = chunk_table(self.B, self.T, 64, cu_seqlens) if table is None else table
        self.N = self.table.sequences
        self.setup = s = _setup(
            call, q.shape, v.shape, (q.dtype, g.dtype, beta.dtype), beta.dim() == 4, a_log is not None,
            dt_bias is not None, self.chip, self.N, self.table.varlen,
            (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 == 0, g.data_ptr() & 15 == 0, beta.data_ptr() & 15 == 0,
        )  # fmt: skip
        self.plan, self.tree, self.some = s.plan, s.tree, s.some
        self.ragged, self.raw, self.erase = s.ragged, s.raw, s.erase
        self.gtma, self.btma = s.gtma, s.btma
        self.tiles_n = max(self.table.chunks, 1) * self.H
        self.index = (self.table.cu, self.table.offsets)

    def other(self) -> Work | None:
        """The form of this call for what float16 has no room for; None where there is one form."""
        if self.call.part != 1:
            return None
        call = replace(self.call, part=2, keep=False)
        x = (self.q, self.k, self.v, self.g, self.beta, self.a_log, self.dt_bias)
        return Work(call, *x, None, self.table, self.long)

    def fixed(
        self, launcher: Launcher, launch: Launch, key: tuple[Any, ...], meta: Callable[[], dict[str, Any]]
    ) -> Fixed:
        """A launcher of this call; ``meta`` says what ``key`` stands for."""
        found = self.setup.launches.get((launcher, key))
        if found is None:
            s = self.setup
            found = launcher.fix({**s.dims, **s.gates, **s.common, **meta()}, launch.options(self.chip))
            s.launches[launcher, key] = found
        return found

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.q.device)

    def like(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        if self.call.uncovered:
            return torch.zeros(x.shape, dtype=dtype or x.dtype, device=x.device)
        return like(x, dtype)

    def final_state(self) -> Tensor:
        a, b = (self.V, self.K) if self.call.v_first else (self.K, self.V)
        return self.new(self.N, self.H, a, b, dtype=torch.float32)

    def rows(self, x: Tensor, block: int, width: int) -> Any:
        return rows_of(x, (block, width), self.plan.tma)

    def mat(self, x: Tensor, block: int, width: int) -> Any:
        return matrix_of(x, (block, width), self.plan.tma)

    def prepared(self, train: bool) -> Parts:
        """Shapes and types of what `prep` makes: tiles, score matrices, decays, marks of strong gates, norms."""
        p, n = self.plan, self.tiles_n
        parts: Parts = (
            ((n * 192, p.kp), self.dtype),
            ((n * 64 * (3 if train else 2), 32), self.dtype),
            ((n * 2, p.kp), torch.float32),
        )
        if self.some:
            parts = (*parts, ((n * 2,), torch.int32))
        return (*parts, ((n, 2, 64), torch.float32)) if train and self.call.norm else parts

    def carve(self, room: Tensor, train: bool) -> None:
        """Take `room`, which `prep` fills or has filled."""
        self.room, self.nm = room, 3 if train else 2
        self.tiles, self.mats, self.decay, *more = carve(room, self.prepared(train))
        self.marks = more.pop(0) if self.some else None
        self.norms = more[0] if more else self.decay

    def prep(self, train: bool) -> None:
        """Tiles, score matrices and decays of all chunks."""
        self.carve(room_for(self.prepared(train), self.q), train)
        if self.table.chunks == 0:
            return
        keys = self.new(self.tiles_n, dtype=torch.int32) if self.call.part == 1 else self.long
        self._prep(train, self.plan, keys, exact=self.call.exact and not self.some)
        if self.some:
            assert self.tree is not None
            self._prep(train, self.tree, keys, exact=True)
        if self.call.part == 1:
            self.long = self.new(8, dtype=torch.int32)
            run_any(1, (keys, self.long, self.tiles_n), {"BLOCK": 1024}, {"num_warps": 4}, (keys,))

    def _prep(self, train: bool, p: VectorPlan, keys: Tensor | None, *, exact: bool) -> None:
        gprec = "raw" if self.raw else p.gprec
        gtma = self.gtma and not p.loop
        run = self.fixed(
            run_prep,
            p.prep,
            (train, exact),
            lambda: {
                "K": self.K,
                "KP": p.kp,
                "KB": p.kb,
                "EXACT": exact,
                "TRAIN": train,
                "GPREC": gprec,
                "SD": TL_TYPES[p.score],
                "IPREC": p.iprec,
                "MMA": train and p.squares,
                "LOOP": p.loop,
                "GTMA": gtma,
                "FREE": self.some and not exact,
                "SOME": exact and self.some,
            },
        )
        run(
            self.H * self.table.chunks,
            (
                self.decay,
                rows_of(self.beta, (64, p.kb), self.btma),
                self.rows(self.q, 64, p.kb),
                self.rows(self.k, 64, p.kb),
                rows_of(self.g, (64, p.kb), gtma),
                self.a_log,
                self.dt_bias,
                self.table.rows,
                one_matrices(ONES_TYPES[gprec], self.q.device),
                self.mat(self.tiles, 64, p.kb),
                self.mat(self.mats, 64, 32),
                self.norms,
                keys,
                self.marks,
                self.T,
                self.table.per_sequence,
                self.H,
                self.H // self.HK,
                self.call.scale,
                self.call.lower,
            ),
            (self.q, self.g, self.beta, self.a_log, self.dt_bias),
        )

    def _scan(
        self,
        *,
        o: Tensor | None,
        states: Tensor | None,
        save: int,
        news: Tensor | None,
        h0: Tensor | None,
        ht: Tensor | None,
        split: int,
        steps: int,
    ) -> None:
        p = self.plan
        bv = p.bv_map if split == 2 else p.bv
        blocks = (p.vp + p.kp if split == 2 else p.vp) // bv
        run = self.fixed(
            run_scan,
            p.scan,
            (bv, self.nm, o is None, save, news is None, h0 is None, ht is None, split),
            lambda: {
                "BV": bv,
                "NM": self.nm,
                "OUT": o is not None,
                "SAVE": save,
                "NEWS": news is not None,
                "INIT": h0 is not None,
                "FINAL": ht is not None,
                "SPLIT": split,
                "VFIRST": self.call.v_first,
                "STAGES": p.scan.stages,
            },
        )
        run(
            blocks * self.H * self.N * (p.segments if split else 1),
            (
                self.decay,
                self.mat(self.tiles, 32, p.kp),
                self.mat(self.mats, 32, 32),
                self.rows(self.v, 32, bv),
                None if o is None else rows_of(o, (32, bv), p.tma and not self.ragged and p.vp == self.V),
                None if states is None else self.mat(states, bv, p.kp),
                None if news is None else self.mat(news, bv, 32),
                h0,
                ht,
                self.long,
                *self.index,
                self.T,
                self.table.per_sequence,
                self.H,
                steps,
                p.segments,
            ),
            (self.v, h0, self.table.cu),
        )

    def scan(
        self,
        h0: Tensor | None,
        *,
        o: Tensor | None = None,
        ht: Tensor | None = None,
        states: Tensor | None = None,
        save: int = 0,
        news: Tensor | None = None,
        entries: Tensor | None = None,
    ) -> Tensor | None:
        """Run the state pass; returns the entry states of the time segments if there are several."""
        if self.N == 0:
            return None
        p = self.plan
        kw: dict[str, Any] = {"o": o, "states": states, "save": save, "news": news, "ht": ht}
        whole = save != 1 and (states is None) == (news is None)
        if whole and vector_groups.serve(self, save > 0) and vector_groups.scan(self, h0, o, ht, states, news):
            return None
        if p.segments == 1:
            self._scan(h0=h0, split=0, steps=0, **kw)
            return None
        # Segments hold whole tiles of 64 tokens.
        steps = triton.cdiv(triton.cdiv(self.T, 64), p.segments) * 2
        if entries is None:
            maps = self.maps()
            self._scan(o=None, states=None, save=0, news=None, h0=None, ht=maps, split=2, steps=steps)
            entries = self.merged(maps, h0)
        self._scan(h0=entries, split=1, steps=steps, **kw)
        return entries

    def maps(self) -> Tensor:
        """Room for the affine maps of all segments."""
        p = self.plan
        return self.new(self.N * p.segments * self.H, p.vp + p.kp, p.kp, dtype=torch.float32)

    def merged(self, maps: Tensor, h0: Tensor | None) -> Tensor:
        """What the segments begin with, in the order of their maps; the first with ``h0``."""
        p = self.plan
        entries = self.new(self.N * p.segments * self.H, p.vp, p.kp, dtype=torch.float32)
        run = self.fixed(
            run_merge,
            p.merge,
            (h0 is None,),
            lambda: {"BV": 16, "INIT": h0 is not None, "VFIRST": self.call.v_first, "PREC": p.prec},
        )
        run(p.vp // 16 * self.H * self.N, (maps, entries, h0, self.H, p.segments), (h0,))
        return entries

    def state_buffers(self) -> tuple[Tensor, Tensor]:
        p, n = self.plan, self.tiles_n
        return self.new(n * 2 * p.vp, p.kp), self.new(n * p.vp, 64)

    def states(self, h0: Tensor | None, entries: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """States before each 32 tokens and new values, both transposed, without the output."""
        states, news = self.state_buffers()
        self.scan(h0, states=states, save=2, news=news, entries=entries)
        return states, news

    def scan_bwd(
        self, do: Tensor, dht: Tensor | None, dh0: Tensor | None, dv: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Reverse scan: dv, gradients of the new values and of the states after each 32 tokens."""
        p, n = self.plan, self.tiles_n
        dv = self.like(self.v) if dv is None else dv
        exits = self.new(n * 2 * p.vp, p.kp)
        ys = self.new(n * p.vp, 64)
        if self.N > 0 and vector_groups.serve(self, True) and vector_groups.reverse(self, do, dv, exits, ys, dht, dh0):
            return dv, ys, exits
        if self.N > 0 and p.segments == 1:
            self._scan_bwd(do, dv, exits, ys, dht, dh0, 0)
        elif self.N > 0:
            maps = self.maps()
            self._scan_bwd(do, dv, exits, ys, None, maps, 2)
            self._scan_bwd(do, dv, exits, ys, self.merged(maps, dht), dh0, 1)
        return dv, ys, exits

    def _scan_bwd(
        self, do: Tensor, dv: Tensor, exits: Tensor, ys: Tensor, dht: Tensor | None, dh0: Tensor | None, split: int
    ) -> None:
        p = self.plan
        bv = p.bv_map if split == 2 else p.bv_bwd
        run = self.fixed(
            run_scan_bwd,
            p.scan_bwd,
            (dht is None, dh0 is None, split),
            lambda: {
                "BV": bv,
                "INIT": dh0 is not None,
                "FINAL": dht is not None,
                "SPLIT": split,
                "VFIRST": self.call.v_first,
                "STAGES": p.scan_bwd.stages,
            },
        )
        run(
            (p.vp + p.kp if split == 2 else p.vp) // bv * self.H * self.N * (p.segments if split else 1),
            (
                self.decay,
                self.mat(self.tiles, 32, p.kp),
                self.mat(self.mats, 32, 32),
                self.rows(do, 32, bv),
                rows_of(dv, (32, bv), p.tma and not self.ragged and p.vp == self.V),
                self.mat(exits, bv, p.kp),
                self.mat(ys, bv, 32),
                dht,
                dh0,
                self.long,
                *self.index,
                self.T,
                self.table.per_sequence,
                self.H,
                triton.cdiv(triton.cdiv(self.T, 64), p.segments) * 2 if split else 0,
                p.segments,
            ),
            (do, dht, dh0, self.table.cu),
        )

    def gradients(self) -> Gradients:
        """Room for what `grad` writes."""
        B, T, H, K = self.B, self.T, self.H, self.K
        groups = self.setup.parts
        chunks = 2 * self.table.chunks
        wide = torch.float32 if H > self.HK else self.q.dtype
        make = torch.zeros if self.call.uncovered else torch.empty
        return Gradients(
            dq=self.like(self.g, dtype=wide),
            dk=self.like(self.g, dtype=wide),
            dg=self.like(self.g),
            db=self.like(self.beta) if self.erase else make(groups, B, T, H, dtype=torch.float32, device=self.q.device),
            da=self.new(groups * chunks, H, dtype=torch.float32) if self.setup.gates["RATE"] else None,
            dbias=self.new(chunks, H, K, dtype=torch.float32) if self.setup.gates["BIAS"] else None,
        )

    def summed(self, r: Gradients) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """dq, dk, dg, dbeta, dA_log, d dt_bias from what `grad` wrote."""
        B, T, H, K = self.B, self.T, self.H, self.K
        dq, dk, da, dbias = r.dq, r.dk, r.da, r.dbias
        group = H // self.HK
        if group > 1:
            dq = total(dq.view(B, T, self.HK, group, K), 3)
            dk = total(dk.view(B, T, self.HK, group, K), 3)
        return (
            dq.to(self.q.dtype),
            dk.to(self.k.dtype),
            r.dg,
            r.db if self.erase else sum_parts(r.db, self.beta.dtype),
            None if da is None or self.a_log is None else total(da, 0).view_as(self.a_log).to(self.a_log.dtype),
            None
            if dbias is None or self.dt_bias is None
            else total(dbias, 0).view_as(self.dt_bias).to(self.dt_bias.dtype),
        )

    def grad(
        self, o: Tensor | None, do: Tensor, states: Tensor, news: Tensor, exits: Tensor, ys: Tensor, r: Gradients
    ) -> None:
        """Chunk-local gradients, into ``r``."""
        p = self.plan
        T, H = self.T, self.H
        chunks = 2 * self.table.chunks
        tma = p.grad_tma
        if chunks > 0:
            scores = self.new(self.tiles_n * 128, 32, dtype=TORCH_TYPES[p.gscore])
            vecs = self.new(self.tiles_n * 2, 5, 32, dtype=torch.float32)
            run = self.fixed(
                run_scores,
                p.scores,
                (),
                lambda: {
                    "V": self.V,
                    "VP": p.vp,
                    "VB": p.vb,
                    "BETA": self.call.beta,
                    "NORM": self.call.norm,
                    "SD": TL_TYPES[p.gscore],
                    "PREC": p.prec,
                    "VARLEN": self.table.varlen,
                    "ROWS": self.ragged,
                    "TMA": tma,
                    "ERASE": self.erase,
                },
            )
            run(
                H * chunks,
                (
                    self.beta,
                    rows_of(self.v, (32, p.vb), tma),
                    rows_of(o, (32, p.vb), tma) if self.call.norm and o is not None else None,
                    rows_of(do, (32, p.vb), tma),
                    matrix_of(news, (p.vb, 32), tma),
                    matrix_of(ys, (p.vb, 32), tma),
                    self.norms,
                    self.table.rows,
                    matrix_of(scores, (32, 32), tma),
                    vecs,
                    self.long,
                    T,
                    self.table.per_sequence,
                    H,
                ),
                (self.v, self.beta, do),
            )
            if (self.some or not self.call.exact) and not (
                vector_groups.serve_grad(self)
                and vector_groups.grad(self, do, states, news, exits, ys, scores, vecs, r)
            ):
                self._grad(run_grad, p, do, states, news, exits, ys, scores, vecs, r)
            if self.tree is not None:
                self._grad(run_grad_exact, self.tree, do, states, news, exits, ys, scores, vecs, r)

    def _grad(
        self, launcher: Launcher, p: VectorPlan, do: Tensor, states: Tensor, news: Tensor, exits: Tensor, ys: Tensor,
        scores: Tensor, vecs: Tensor, r: Gradients,
    ) -> None:  # fmt: skip
        B, T, H, K = self.B, self.T, self.H, self.K
        group = H // self.HK
        dq, dk, dg = r.dq, r.dk, r.dg
        same = dg.dtype == dq.dtype
        otma = p.out_tma and not self.ragged and group == 1 and p.kp == K
        units = p.kp // p.gkb * H * 2 * self.table.chunks
        run = self.fixed(
            launcher,
            p.grad,
            (otma, same),
            lambda: {
                "KB": p.gkb,
                "VB": p.vb,
                "GPREC": p.prec,
                "SD": TL_TYPES[p.gscore],
                "OTMA": otma,
                "DGTMA": otma and same,
                "RAW": self.raw,
                "FREE": self.some,
                "SOME": self.some,
                "PARTS": self.setup.parts,
                "TURN": self.call.gate > 0 and p.grad.regs is not None and p.gscore == "bf16",
            },
        )
        args = (
            self.decay,
            self.beta,
            self.q,
            self.k,
            self.g,
            do,
            news,
            ys,
            states,
            exits,
            scores,
            vecs,
            self.norms,
            one_matrices(torch.bfloat16 if p.gscore == "bf16" else torch.float32, self.q.device),
            self.a_log,
            self.dt_bias,
            self.table.rows,
            rows_of(dq, (32, p.gkb), otma),
            rows_of(dk, (32, p.gkb), otma),
            rows_of(dg, (32, p.gkb), otma and same),
            r.db,
            r.da,
            r.dbias,
        )
        tail = (T, self.table.per_sequence, H, group, B * T, self.call.scale, self.call.lower)
        given = (self.q, self.g, self.beta, do, self.a_log, self.dt_bias, dq)
        if launcher is run_grad:
            run(units, (*args, self.long, *tail), given)
        else:
            programs = min(units, p.seekers) if self.some else units
            run(programs, (*args, self.marks, self.long, *tail, units), given)
