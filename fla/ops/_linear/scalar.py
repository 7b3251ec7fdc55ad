# SPDX-License-Identifier: MIT
"""Host side of the scalar-decay kernels: buffers, descriptors and launches. No autograd here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fla.ops._common.device_index import ChunkTable, chunk_table
from fla.ops._common.launch import Launcher, descriptor
from fla.ops._common.policy import Chip, Launch, chip_of, pow2
from fla.ops._linear.kernels import scalar_scan as kernel
from fla.ops._linear.kernels.scalar_decode import scalar_recurrent
from fla.ops._linear.kernels.scalar_grad import scalar_grad
from fla.ops._linear.policy import ScalarPlan, scalar_plan, time_segments

_sums, _scan, _reverse = Launcher(kernel.scalar_sums), Launcher(kernel.scalar_scan), Launcher(kernel.scalar_reverse)
_merge, _grad, _recurrent = Launcher(kernel.scalar_merge), Launcher(scalar_grad), Launcher(scalar_recurrent)
_PLAIN = {"num_warps": 4, "num_stages": 1}


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

    @classmethod
    def make(
        cls, k: Tensor, v: Tensor, scale: float, decay: int, v_first: bool, cu_seqlens: Tensor | None,
        chip: Chip | None = None, plan: ScalarPlan | None = None, segments: int | None = None,
    ) -> ScalarCall:  # fmt: skip
        B, T, H, K = k.shape
        V = v.shape[3]
        chip = chip_of(k.device) if chip is None else chip
        sequences = B if cu_seqlens is None else cu_seqlens.numel() - 1
        if plan is None:
            plan = scalar_plan(chip, k.dtype, K, V, sequences * H)
        table = chunk_table(B, T, plan.chunk, cu_seqlens)
        if segments is None:
            segments = time_segments(plan, chip, sequences * H, V, table.chunks // max(sequences, 1))
        return cls(B, T, H, K, V, plan, chip, table, scale, decay, v_first, segments)

    @property
    def tiles(self) -> int:
        return self.table.chunks * self.H

    @property
    def blocks_v(self) -> int:
        return -(-self.V // self.plan.block_v)

    def state_shape(self) -> tuple[int, ...]:
        return (self.table.sequences, self.H, *((self.V, self.K) if self.v_first else (self.K, self.V)))

    def rows(self, x: Tensor, width: int, block: int, use: bool = True) -> Any:
        """A descriptor of ``x`` `[B, T, H, width]` for tiles of a chunk, or ``x`` where none is used."""
        if not (use and self.plan.descriptors):
            return x
        return descriptor(x, self.B * self.T, self.H * width, self.plan.chunk, block)

    def states(self, x: Tensor, block_v: int, block_k: int, use: bool = True) -> Any:
        if not (use and self.plan.descriptors):
            return x
        return descriptor(x, self.tiles * self.V, self.K, block_v, block_k)


def decay_sums(call: ScalarCall, g: Tensor | None) -> Tensor | None:
    """Sums of log decays (base 2) inside each chunk `[chunks * H, C]`, fp32; None without decays per token."""
    if g is None:
        return None
    t = call.table
    sums = torch.empty(call.tiles, call.plan.chunk, dtype=torch.float32, device=g.device)
    block = min(pow2(call.H, 1), 32)
    _sums(
        t.chunks * -(-call.H // block),
        (g, sums, sums if t.rows is None else t.rows, call.T, t.per_sequence, call.H),
        {"C": call.plan.chunk, "BH": block, "VARLEN": t.varlen},
        _PLAIN,
        (g,),
    )
    return sums


def _entries(call: ScalarCall, like: Tensor) -> tuple[Tensor, Tensor]:
    heads = call.table.sequences * call.segments * call.H
    size = call.blocks_v * call.plan.block_v, call.plan.block_k
    entry = torch.empty(heads, *size, dtype=torch.float32, device=like.device)
    return entry, torch.empty(heads, dtype=torch.float32, device=like.device)


def _merged(call: ScalarCall, entry: Tensor, total: Tensor, reverse: bool) -> Tensor:
    size = entry.shape[1] * entry.shape[2]
    _merge(
        -(-size // 1024) * call.H * call.table.sequences, (entry, total, call.segments, call.H, size),
        {"BS": 1024, "REVERSE": reverse}, _PLAIN, (),
    )  # fmt: skip
    return entry


def _index(call: ScalarCall, other: Tensor) -> tuple[Any, ...]:
    t = call.table
    return (other if t.cu is None else t.cu, other if t.offsets is None else t.offsets, call.T, t.per_sequence, call.H)


def _run_scan(
    call: ScalarCall, q: Tensor, k: Tensor, v: Tensor, sums: Tensor | None, gamma: Tensor | None, h0: Tensor | None,
    entry: Tensor | None, total: Tensor | None, o: Tensor | None, ht: Tensor | None, S: Tensor | None, parts: int,
) -> None:  # fmt: skip
    p, bv = call.plan, call.plan.block_v
    launch = p.recompute if o is None else p.forward
    split = kernel.SUMMARY if total is not None else kernel.WHOLE if entry is None else kernel.STRETCH
    args = (
        q, k, v, call.rows(q, call.K, p.block_k, o is not None), call.rows(k, call.K, p.block_k),
        call.rows(v, call.V, bv), k if sums is None else sums, k if gamma is None else gamma, v if o is None else o,
        v if o is None else call.rows(o, call.V, bv), k if S is None else S,
        k if S is None else call.states(S, bv, p.block_k, p.block_k <= 128), k if h0 is None else h0,
        k if ht is None else ht, k if entry is None else entry, k if total is None else total, *_index(call, k),
        int(h0 is not None), int(ht is not None), call.segments, parts, call.scale,
    )  # fmt: skip
    meta = {
        "K": call.K, "V": call.V, "BK": p.block_k, "BV": bv, "C": p.chunk, "DECAY": call.decay, "OUT": o is not None,
        "SAVE": S is not None, "SPLIT": split, "VFIRST": call.v_first, "VARLEN": call.table.varlen,
        "DESC": p.descriptors, "DOT": p.dot, "STAGES": launch.stages,
    }  # fmt: skip
    given = (q, k, v, gamma, h0, call.table.cu, ht)
    _scan(call.blocks_v * call.H * parts * call.table.sequences, args, meta, launch.options(call.chip), given)


def entries(
    call: ScalarCall, q: Tensor, k: Tensor, v: Tensor, sums: Tensor | None, gamma: Tensor | None, h0: Tensor | None
) -> Tensor | None:  # fmt: skip
    """States (transposed, padded, fp32) in which the stretches of each sequence begin; None where none is split."""
    if call.segments == 1:
        return None
    entry, total = _entries(call, k)
    _run_scan(call, q, k, v, sums, gamma, h0, entry, total, None, None, None, call.segments - 1)
    return _merged(call, entry, total, False)


def scan(
    call: ScalarCall, q: Tensor, k: Tensor, v: Tensor, sums: Tensor | None, gamma: Tensor | None, h0: Tensor | None,
    entry: Tensor | None, output: bool, final: bool, save: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """(o, final state, S^T `[chunks * H, V, K]`), each None unless asked for."""
    o = torch.empty_like(v) if output else None
    ht = torch.empty(call.state_shape(), dtype=torch.float32, device=k.device) if final else None
    S = k.new_empty(call.tiles, call.V, call.K) if save else None
    _run_scan(call, q, k, v, sums, gamma, h0, entry, None, o, ht, S, call.segments)
    return o, ht, S


def _run_reverse(
    call: ScalarCall, q: Tensor, k: Tensor, do: Tensor, sums: Tensor | None, gamma: Tensor | None, dht: Tensor | None,
    entry: Tensor | None, total: Tensor | None, dv: Tensor | None, X: Tensor | None, dh0: Tensor | None, parts: int,
) -> None:  # fmt: skip
    p, bv, out = call.plan, call.plan.block_v, total is None
    split = kernel.SUMMARY if total is not None else kernel.WHOLE if entry is None else kernel.STRETCH
    args = (
        q, k, do, call.rows(q, call.K, p.block_k), call.rows(k, call.K, p.block_k, out), call.rows(do, call.V, bv),
        k if sums is None else sums, k if gamma is None else gamma, do if dv is None else dv,
        do if dv is None else call.rows(dv, call.V, bv), k if X is None else X,
        k if X is None else call.states(X, bv, p.block_k, p.block_k <= 128), k if dht is None else dht,
        k if dh0 is None else dh0, k if entry is None else entry, k if total is None else total, *_index(call, k),
        int(dht is not None), int(dh0 is not None), call.segments, parts, call.scale,
    )  # fmt: skip
    meta = {
        "K": call.K, "V": call.V, "BK": p.block_k, "BV": bv, "C": p.chunk, "DECAY": call.decay, "SPLIT": split,
        "VFIRST": call.v_first, "VARLEN": call.table.varlen, "DESC": p.descriptors, "DOT": p.dot,
        "STAGES": p.reverse.stages,
    }  # fmt: skip
    given = (q, k, do, gamma, dht, dh0, call.table.cu)
    _reverse(call.blocks_v * call.H * parts * call.table.sequences, args, meta, p.reverse.options(call.chip), given)


def reverse(
    call: ScalarCall, q: Tensor, k: Tensor, do: Tensor, sums: Tensor | None, gamma: Tensor | None, dht: Tensor | None,
    dh0: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(dv, X^T `[chunks * H, V, K]`); fills ``dh0`` where given."""
    entry = None
    if call.segments > 1:
        entry, total = _entries(call, k)
        _run_reverse(call, q, k, do, sums, gamma, dht, entry, total, None, None, None, call.segments - 1)
        _merged(call, entry, total, True)
    dv = torch.empty_like(do)
    X = k.new_empty(call.tiles, call.V, call.K)
    _run_reverse(call, q, k, do, sums, gamma, dht, entry, None, dv, X, dh0, call.segments)
    return dv, X


def gradients(
    call: ScalarCall, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, sums: Tensor | None, gamma: Tensor | None,
    do: Tensor, S: Tensor, X: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(dq, dk, dg in g's dtype or None)."""
    p, t = call.plan, call.table
    bv, bk = p.grad_v, p.grad_k
    blocks, rows = -(-call.K // bk), call.B * call.T
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    dg = None
    if g is not None:
        # Shares of the blocks stay fp32; what is final is written in the caller's dtype at once.
        dg = (
            torch.empty_like(g)
            if blocks == 1
            else torch.empty((blocks, *g.shape), dtype=torch.float32, device=g.device)
        )
    main = (
        q, k, v, do, call.rows(q, call.K, bk), call.rows(k, call.K, bk), v, do, S, call.states(S, bv, bk), X,
        call.states(X, bv, bk),
    )  # fmt: skip
    decays = (k if sums is None else sums, k if gamma is None else gamma, k if g is None else g)
    out = (dq, call.rows(dq, call.K, bk), dk, call.rows(dk, call.K, bk))
    rest = (k if dg is None else dg, k if t.rows is None else t.rows, *_index(call, k), rows, call.scale)
    meta = {
        "K": call.K, "V": call.V, "BK": bk, "BV": bv, "C": p.chunk, "DECAY": call.decay, "VARLEN": t.varlen,
        "DESC": p.descriptors, "TAILS": False, "DOT": p.dot,
    }  # fmt: skip
    given = (q, k, v, do, gamma, g, t.cu)
    options = p.grad.options(call.chip)
    if not p.descriptors or t.varlen or p.chunk <= call.T:
        _grad(blocks * call.tiles, (*main, *decays, *out, *rest), meta, options, given)
    if p.descriptors and (t.varlen or call.T % p.chunk):
        args = (q, k, v, do, q, k, v, do, S, S, X, X, *decays, dq, dq, dk, dk, *rest)
        meta = {**meta, "DESC": False, "TAILS": True}
        _grad(blocks * call.H * t.sequences, args, meta, options, given)
    if dg is not None and g is not None and blocks > 1:
        dg = dg.sum(0).to(g.dtype)
    return dq, dk, dg


def decode_launch(K: int, v_first: bool) -> tuple[int, Launch]:
    """Columns of V in a program and its compiler options; the reasons are those of `fla.ops._delta.decode`."""
    if v_first:
        return max(4, min(16, 1024 // pow2(K))), Launch(1)
    return (32, Launch(2)) if K > 64 else (32, Launch(1))


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor | None, gamma: Tensor | None, scale: float, state: Tensor | None,
    final: bool, reverse: bool, v_first: bool, cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Token by token in one launch: outputs and the final state (fp32). All tensors are contiguous."""
    B, T, H, K = k.shape
    V = v.shape[3]
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    o = torch.empty_like(v)
    ht = torch.empty((N, H, *((V, K) if v_first else (K, V))), dtype=torch.float32, device=k.device) if final else None
    bv, launch = decode_launch(K, v_first)
    decay = kernel.TOKEN_DECAY if g is not None else kernel.NO_DECAY if gamma is None else kernel.HEAD_DECAY
    args = (
        q, k, v, k if g is None else g, k if gamma is None else gamma, k if state is None else state,
        k if ht is None else ht, o, k if cu_seqlens is None else cu_seqlens, T, H, int(state is not None),
        int(ht is not None), scale,
    )  # fmt: skip
    meta = {
        "K": K, "V": V, "BK": pow2(K), "BV": bv, "DECAY": decay, "REVERSE": reverse, "VFIRST": v_first,
        "VARLEN": cu_seqlens is not None,
    }  # fmt: skip
    _recurrent(
        -(-V // bv) * H * N, args, meta, launch.options(chip_of(k.device)), (q, k, v, g, gamma, state, cu_seqlens, ht)
    )
    return o, ht
