# SPDX-License-Identifier: MIT
"""Launches and autograd of the vector-decay chunk engine (KDA)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fla.ops._common.device_index import ChunkTable, chunk_table
from fla.ops._common.launch import Launcher, descriptor
from fla.ops._common.policy import Chip, chip_of, has_descriptors
from fla.ops._delta.autograd import on_device
from fla.ops._delta.kernels.vector_grad import vector_grad, vector_scores
from fla.ops._delta.kernels.vector_prep import vector_prep
from fla.ops._delta.kernels.vector_scan import vector_merge, vector_scan, vector_scan_bwd
from fla.ops._delta.vector_policy import VectorPlan, plan


class _Ordered(Launcher):
    """A launcher that takes constexprs in any order."""

    def __init__(self, fn: Any) -> None:
        super().__init__(fn)
        self.names = tuple(p.name for p in getattr(fn, "params", ()) if p.is_constexpr)

    def __call__(
        self,
        grid: int,
        args: tuple[Any, ...],
        meta: dict[str, Any],
        options: dict[str, Any],
        given: tuple[Tensor | None, ...] | None = None,
    ) -> None:
        # The interpreter's functions have no parameters to look at.
        super().__call__(grid, args, {name: meta[name] for name in self.names} or meta, options, given)


_prep, _scan, _scan_bwd = _Ordered(vector_prep), _Ordered(vector_scan), _Ordered(vector_scan_bwd)
_merge, _scores, _grad = _Ordered(vector_merge), _Ordered(vector_scores), _Ordered(vector_grad)

_TL = {
    "bf16": tl.bfloat16,
    "fp16": tl.float16,
    "fp32": tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


# operand type of the 0/1 sums of gates, by their precision
_ONES = {
    "raw": torch.bfloat16,
    "fp16": torch.float16,
    "tf32x3": torch.float32,
    "tf32": torch.float32,
    "ieee": torch.float32,
}
_TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


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


def _one_matrices(dtype: torch.dtype, device: torch.device) -> Tensor:
    i = torch.arange(64, device=device)[:, None]
    t = torch.arange(64, device=device)[None, :]
    same = i // 32 == t // 32
    out = [(i >= t) & same, (i < t) & same, ~same]
    for half in (16, 8, 4, 2, 1):
        mid = i // (2 * half) * (2 * half) + half
        out.append(((i >= mid) & (t >= mid) & (t <= i)) | ((i < mid) & (t > i) & (t < mid)))
    return torch.stack(out).to(dtype)


_cached_ones = functools.lru_cache(maxsize=32)(_one_matrices)


def one_matrices(dtype: torch.dtype, device: torch.device) -> Tensor:
    """0/1 matrices `[8, 64, 64]` whose products with gates `[64 tokens, channels]` are sums over tokens.

    0: up to and with the token, 1: after it, both inside its block of 32; 2: all of the other block; 3..7: levels
    of the tree of the exact scores. Blocks of 32, 16, 8, 4 and 2 tokens are split in the middle: a token of the second
    half needs the decay from the middle up to itself, one of the first half the decay after itself up to the middle, so
    that factors never exceed 1, for any gate.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # Memory of a capture belongs to its graph.
        return _one_matrices(dtype, device)
    return _cached_ones(dtype, device)


def _rows(x: Tensor, block: tuple[int, int], tma: bool) -> Any:
    """A tensor `[..., H, D]` as matrix of rows, by descriptor or as it is."""
    width = x.shape[-1] * x.shape[-2]
    return descriptor(x, x.numel() // width, width, *block) if tma else x


def _mat(x: Tensor, block: tuple[int, int], tma: bool) -> Any:
    """A buffer `[rows, width]` by descriptor or as it is."""
    return descriptor(x, x.shape[0], x.shape[1], *block) if tma else x


def _aligned(*tensors: Tensor) -> bool:
    """Whether descriptors can address every head's tile: bases and heads on 16 bytes."""
    return all(x.data_ptr() % 16 == 0 and (x.shape[-1] * x.element_size()) % 16 == 0 and x.numel() > 0 for x in tensors)


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
    ) -> None:
        self.call, self.q, self.k, self.v, self.g, self.beta = call, q, k, v, g, beta
        self.a_log, self.dt_bias = a_log, dt_bias
        self.B, self.T, self.HK, self.K = q.shape
        self.H, self.V = v.shape[2], v.shape[3]
        self.chip: Chip = chip_of(q.device)
        self.table = chunk_table(self.B, self.T, 64, cu_seqlens) if table is None else table
        self.N = self.table.sequences
        self.plan: VectorPlan = plan(
            self.chip,
            str(q.dtype).removeprefix("torch."),
            self.K,
            self.V,
            sequences=self.N,
            heads=self.H,
            length=self.T,
            exact=call.exact,
            normed=call.norm,
            varlen=self.table.varlen,
            aligned=_aligned(q, k, v) and has_descriptors(),
        )
        self.tiles_n = max(self.table.chunks, 1) * self.H
        self.ragged = self.table.varlen or self.T % 64 != 0
        p = self.plan
        self.gtma = p.tma and g.element_size() == 2 and _aligned(g)
        # bf16 decays are summed as they are, without rounding
        self.raw = call.gate == 0 and g.dtype == torch.bfloat16 and p.gscore == "bf16"
        self.index = (self.table.cu, self.table.offsets)
        self.common = {
            "DT": _TL[q.dtype],
            "PREC": p.prec,
            "VARLEN": self.table.varlen,
            "ROWS": self.ragged,
            "TMA": p.tma,
        }
        self.dims = {"K": self.K, "KP": p.kp, "V": self.V, "VP": p.vp}
        self.gates = {
            "GATE": call.gate,
            "RATE": call.gate > 0 and a_log is not None,
            "BIAS": call.gate > 0 and dt_bias is not None,
            "BETA": call.beta,
            "NORM": call.norm,
            "EXACT": call.exact,
            "GTMA": self.gtma,
        }

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.q.dtype, device=self.q.device)

    def like(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        make = torch.zeros_like if self.call.uncovered else torch.empty_like
        return make(x, dtype=dtype, memory_format=torch.contiguous_format)

    def final_state(self) -> Tensor:
        a, b = (self.V, self.K) if self.call.v_first else (self.K, self.V)
        return self.new(self.N, self.H, a, b, dtype=torch.float32)

    def rows(self, x: Tensor, block: int, width: int) -> Any:
        return _rows(x, (block, width), self.plan.tma)

    def mat(self, x: Tensor, block: int, width: int) -> Any:
        return _mat(x, (block, width), self.plan.tma)

    def prep(self, train: bool) -> None:
        """Tiles, score matrices and decays of all chunks."""
        p, n = self.plan, self.tiles_n
        self.nm = 3 if train else 2
        self.tiles = self.new(n * 192, p.kp)
        self.mats = self.new(n * 64 * self.nm, 32)
        self.decay = self.new(n * 2, p.kp, dtype=torch.float32)
        self.norms = self.new(n, 2, 64, dtype=torch.float32) if train and self.call.norm else self.decay
        if self.table.chunks == 0:
            return
        gprec = "raw" if self.raw else p.gprec
        _prep(
            self.H * self.table.chunks,
            (
                self.beta,
                self.rows(self.q, 64, p.kb),
                self.rows(self.k, 64, p.kb),
                _rows(self.g, (64, p.kb), self.gtma),
                self.a_log,
                self.dt_bias,
                self.table.rows,
                one_matrices(_ONES[gprec], self.q.device),
                self.mat(self.tiles, 64, p.kb),
                self.mat(self.mats, 64, 32),
                self.decay,
                self.norms,
                self.T,
                self.table.per_sequence,
                self.H,
                self.H // self.HK,
                self.call.scale,
                self.call.lower,
            ),
            {
                "K": self.K,
                "KP": p.kp,
                "KB": p.kb,
                "TRAIN": train,
                "GPREC": gprec,
                "SD": _TL[p.score],
                "IPREC": p.iprec,
                **self.gates,
                **self.common,
            },
            p.prep.options(self.chip),
            given=(self.q, self.g, self.beta, self.a_log, self.dt_bias),
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
        _scan(
            blocks * self.H * self.N * (p.segments if split else 1),
            (
                self.decay,
                self.mat(self.tiles, 32, p.kp),
                self.mat(self.mats, 32, 32),
                self.rows(self.v, 32, bv),
                None if o is None else _rows(o, (32, bv), p.tma and not self.ragged and self.V % bv == 0),
                None if states is None else self.mat(states, bv, p.kp),
                None if news is None else self.mat(news, bv, 32),
                h0,
                ht,
                *self.index,
                self.T,
                self.table.per_sequence,
                self.H,
                steps,
                p.segments,
            ),
            {
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
                **self.dims,
                **self.common,
            },
            p.scan.options(self.chip),
            given=(self.v, h0, self.table.cu),
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
        if p.segments == 1:
            self._scan(h0=h0, split=0, steps=0, **kw)
            return None
        # Segments hold whole tiles of 64 tokens.
        steps = triton.cdiv(triton.cdiv(self.T, 64), p.segments) * 2
        if entries is None:
            maps = self.new(self.N * p.segments * self.H, p.vp + p.kp, p.kp, dtype=torch.float32)
            entries = self.new(self.N * p.segments * self.H, p.vp, p.kp, dtype=torch.float32)
            self._scan(o=None, states=None, save=0, news=None, h0=None, ht=maps, split=2, steps=steps)
            _merge(
                p.vp // 16 * self.H * self.N,
                (
                    maps,
                    entries,
                    h0,
                    self.H,
                    p.segments,
                ),
                {"BV": 16, "INIT": h0 is not None, "VFIRST": self.call.v_first, "PREC": p.prec, **self.dims},
                p.merge.options(self.chip),
                given=(h0,),
            )
        self._scan(h0=entries, split=1, steps=steps, **kw)
        return entries

    def state_buffers(self) -> tuple[Tensor, Tensor]:
        p, n = self.plan, self.tiles_n
        return self.new(n * 2 * p.vp, p.kp), self.new(n * p.vp, 64)

    def states(self, h0: Tensor | None, entries: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """States before each 32 tokens and new values, both transposed, without the output."""
        states, news = self.state_buffers()
        self.scan(h0, states=states, save=2, news=news, entries=entries)
        return states, news

    def scan_bwd(self, do: Tensor, dht: Tensor | None, dh0: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Reverse scan: dv, gradients of the new values and of the states after each 32 tokens."""
        p, n = self.plan, self.tiles_n
        dv = self.like(self.v)
        exits = self.new(n * 2 * p.vp, p.kp)
        ys = self.new(n * p.vp, 64)
        if self.N > 0:
            _scan_bwd(
                p.vp // p.bv_bwd * self.H * self.N,
                (
                    self.decay,
                    self.mat(self.tiles, 32, p.kp),
                    self.mat(self.mats, 32, 32),
                    self.rows(do, 32, p.bv_bwd),
                    _rows(dv, (32, p.bv_bwd), p.tma and not self.ragged and self.V % p.bv_bwd == 0),
                    self.mat(exits, p.bv_bwd, p.kp),
                    self.mat(ys, p.bv_bwd, 32),
                    dht,
                    dh0,
                    *self.index,
                    self.T,
                    self.table.per_sequence,
                    self.H,
                ),
                {
                    "BV": p.bv_bwd,
                    "INIT": dh0 is not None,
                    "FINAL": dht is not None,
                    "VFIRST": self.call.v_first,
                    "STAGES": p.scan_bwd.stages,
                    **self.dims,
                    **self.common,
                },
                p.scan_bwd.options(self.chip),
                given=(do, dht, dh0, self.table.cu),
            )
        return dv, ys, exits

    def grad(
        self, o: Tensor, do: Tensor, states: Tensor, news: Tensor, exits: Tensor, ys: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Chunk-local gradients (dq, dk, dg, dbeta, dA_log, d dt_bias)."""
        p = self.plan
        B, T, H, K = self.B, self.T, self.H, self.K
        group = H // self.HK
        groups = p.kp // p.gkb
        chunks = 2 * self.table.chunks
        wide = torch.float32 if group > 1 else self.q.dtype
        dq = self.like(self.g, dtype=wide)
        dk = self.like(self.g, dtype=wide)
        dg = self.like(self.g)
        make = torch.zeros if self.call.uncovered else torch.empty
        db = make(groups, B * T, H, dtype=torch.float32, device=self.q.device)
        da = self.new(groups * chunks, H, dtype=torch.float32) if self.gates["RATE"] else None
        dbias = self.new(chunks, H, K, dtype=torch.float32) if self.gates["BIAS"] else None
        tma = p.grad_tma
        same = dg.dtype == dq.dtype
        otma = p.tma and not self.ragged and group == 1 and K % p.gkb == 0
        if chunks > 0:
            scores = self.new(self.tiles_n * 128, 32, dtype=_TORCH[p.gscore])
            vecs = self.new(self.tiles_n * 2, 5, 32, dtype=torch.float32)
            _scores(
                H * chunks,
                (
                    self.beta,
                    _rows(self.v, (32, p.vb), tma),
                    _rows(o, (32, p.vb), tma) if self.call.norm else None,
                    _rows(do, (32, p.vb), tma),
                    _mat(news, (p.vb, 32), tma),
                    _mat(ys, (p.vb, 32), tma),
                    self.norms,
                    self.table.rows,
                    _mat(scores, (32, 32), tma),
                    vecs,
                    T,
                    self.table.per_sequence,
                    H,
                ),
                {
                    "V": self.V,
                    "VP": p.vp,
                    "VB": p.vb,
                    "BETA": self.call.beta,
                    "NORM": self.call.norm,
                    "SD": _TL[p.gscore],
                    "PREC": p.prec,
                    "VARLEN": self.table.varlen,
                    "ROWS": self.ragged,
                    "TMA": tma,
                },
                p.scores.options(self.chip),
                given=(self.v, self.beta, do),
            )
            _grad(
                groups * H * chunks,
                (
                    self.beta,
                    _rows(self.q, (32, p.gkb), tma),
                    _rows(self.k, (32, p.gkb), tma),
                    _rows(self.g, (32, p.gkb), tma and self.gtma),
                    _rows(do, (32, p.vb), tma),
                    _mat(news, (p.vb, 32), tma),
                    _mat(ys, (p.vb, 32), tma),
                    _mat(states, (p.vb, p.gkb), tma),
                    _mat(exits, (p.vb, p.gkb), tma),
                    _mat(scores, (32, 32), tma),
                    vecs,
                    self.decay,
                    self.norms,
                    one_matrices(torch.bfloat16 if p.gscore == "bf16" else torch.float32, self.q.device),
                    self.a_log,
                    self.dt_bias,
                    self.table.rows,
                    _rows(dq, (32, p.gkb), otma),
                    _rows(dk, (32, p.gkb), otma),
                    _rows(dg, (32, p.gkb), otma and same),
                    db,
                    da,
                    dbias,
                    T,
                    self.table.per_sequence,
                    H,
                    group,
                    B * T,
                    self.call.scale,
                    self.call.lower,
                ),
                {
                    "KB": p.gkb,
                    "VB": p.vb,
                    "GPREC": p.prec,
                    "SD": _TL[p.gscore],
                    "OTMA": otma,
                    "DGTMA": otma and same,
                    "RAW": self.raw,
                    **self.dims,
                    **self.gates,
                    **self.common,
                    "TMA": tma,
                    "GTMA": tma and self.gtma,
                },
                p.grad.options(self.chip),
                given=(self.q, self.g, self.beta, do, self.a_log, self.dt_bias, dq),
            )
        if group > 1:
            dq = dq.view(B, T, self.HK, group, K).sum(3)
            dk = dk.view(B, T, self.HK, group, K).sum(3)
        dbeta = (db[0] if groups == 1 else db.sum(0)).view(B, T, H)
        return (
            dq.to(self.q.dtype),
            dk.to(self.k.dtype),
            dg,
            dbeta.to(self.beta.dtype),
            None if da is None or self.a_log is None else da.sum(0).view_as(self.a_log).to(self.a_log.dtype),
            None
            if dbias is None or self.dt_bias is None
            else dbias.sum(0).view_as(self.dt_bias).to(self.dt_bias.dtype),
        )


class VectorDelta(torch.autograd.Function):
    """Chunked delta rule with a decay per key channel. Returns (o, final state or None).

    Saved: the inputs, the output, the scaled tiles, the inverse and the scores of each chunk of 32 tokens; with
    ``call.keep`` also the states and new values, which are otherwise computed again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        a_log: Tensor | None,
        dt_bias: Tensor | None,
        h0: Tensor | None,
        cu_seqlens: Tensor | None,
        call: VectorCall,
        final: bool,
    ) -> tuple[Tensor, Tensor | None]:
        work = Work(call, q, k, v, g, beta, a_log, dt_bias, cu_seqlens)
        work.prep(train=True)
        o = work.like(v)
        ht = work.final_state() if final else None
        states, news = work.state_buffers() if call.keep else (None, None)
        entries = work.scan(h0, o=o, ht=ht, states=states, save=2 if call.keep else 0, news=news)
        ctx.save_for_backward(
            q, k, v, g, beta, a_log, dt_bias, h0, o,
            work.tiles, work.mats, work.decay, work.norms, entries, states, news,
        )  # fmt: skip
        ctx.call, ctx.table = call, work.table
        ctx.set_materialize_grads(False)
        return o, ht

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor | None, dht: Tensor | None) -> tuple[Any, ...]:
        q, k, v, g, beta, a_log, dt_bias, h0, o, tiles, mats, decay, norms, entries, states, news = ctx.saved_tensors
        if do is None and dht is None:
            return (None,) * 11
        do = torch.zeros_like(v) if do is None else do.contiguous()
        dht = None if dht is None else dht.contiguous()
        dh0 = torch.empty_like(h0) if ctx.needs_input_grad[7] else None
        with on_device(q):
            work = Work(ctx.call, q, k, v, g, beta, a_log, dt_bias, None, ctx.table)
            work.tiles, work.mats, work.decay, work.norms, work.nm = tiles, mats, decay, norms, 3
            if states is None:
                states, news = work.states(h0, entries)
            dv, ys, exits = work.scan_bwd(do, dht, dh0)
            dq, dk, dg, db, da, dbias = work.grad(o, do, states, news, exits, ys)
        return dq, dk, dv, dg, db, da, dbias, dh0, None, None, None
