# SPDX-License-Identifier: MIT
"""Chunked delta rule in PyTorch, for any device: the engine behind every op of the family where Triton does not run.

Within a chunk the rule is solved exactly: with ``L`` the scores of read keys against write keys, and ``S`` the state
that the chunk starts from, the values that it really writes are ``(I + L)^-1 (z - R S)``, where ``z = gain * v`` and
``R`` are the decayed read keys. Only the state passes from chunk to chunk. Float32 arithmetic for 16-bit and float32
inputs, float64 for float64.

Source: Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (2024); the gated form
of Yang et al., "Gated Delta Networks" (2024); decay per channel of Kimi Team, "Kimi Linear" (2025).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fla.ops._common.gates import compute_dtype, without_autocast
from fla.ops._common.single import once, probes
from fla.ops._common.varlen import ChunkPlan, longest_sequence, plan_chunks
from fla.ops._delta.rows import Decay, DeltaRow, Operands, ReadTime
from fla.ops._delta.torch_decay import DecayGradient, DecayTree, for_rows, from_rows
from fla.ops._delta.torch_scores import (
    channelwise_backward,
    channelwise_scores,
    dense_backward,
    dense_decay_gradient,
    dense_factors,
    dense_scores,
    unit_lower_inverse,
)

CHUNK = 64
# Elements of one operand that are worked on at a time: few enough on a CPU that intermediates stay in cache.
_SLAB_CPU, _SLAB = 1 << 17, 1 << 24


class _Chunks(NamedTuple):
    """Operands as chunks in step order: ``q, write, read [X, C, K]`` (``read`` None: as ``write``), ``value [X, C,
    V]``, ``erase [X, C, 1 or K]``, ``gain [X, C, 1 or V]``, ``g [X, C, 1 or K]``; None for ones, or for no decay."""

    q: Tensor
    write: Tensor
    value: Tensor
    read: Tensor | None
    erase: Tensor | None
    gain: Tensor | None
    g: Tensor | None

    def part(self, part: slice) -> _Chunks:
        return _Chunks(*(None if t is None else t[part] for t in self))  # type: ignore[arg-type]

    def query_and_read(self) -> Tensor:
        """``q`` and the erased read keys in one tensor ``[X, 2, C, K]``."""
        X, C, K = self.q.shape
        both = self.q.new_empty(X, 2, C, K)
        both[:, 0] = self.q
        read = self.write if self.read is None else self.read
        if self.erase is None:
            both[:, 1] = read
        else:
            torch.mul(read, self.erase, out=both[:, 1])
        return both


def _slabs(steps: list[int], elements: int, device: torch.device) -> list[tuple[slice, list[int]]]:
    """Runs of whole steps of about ``_SLAB`` elements, ``elements`` to a chunk: their chunks and their steps."""
    size = (_SLAB_CPU if device.type == "cpu" else _SLAB) // max(1, elements)
    slabs, start, run = [], 0, []
    for i, step in enumerate(steps):
        run.append(step)
        if i + 1 == len(steps) or sum(run) + steps[i + 1] > size:
            slabs.append((slice(start, start + sum(run)), run))
            start, run = start + sum(run), []
    return slabs


def _scan(
    z: Tensor,
    read: Tensor,
    write: Tensor,
    inverse: Tensor,
    total: Tensor | None,
    state: Tensor,
    steps: list[int],
    h: Tensor,
) -> Tensor:
    """Pass ``state [N, K, V]`` (updated in place) through the chunks; puts the states before chunks into ``h`` and
    returns the written values."""
    written = torch.empty_like(z)
    totals = total.unsqueeze(-1).split(steps) if total is not None else [None] * len(steps)
    parts = [t.split(steps) for t in (z, read, write.mT, inverse, h, written)]
    for value, r, w, inv, before, new, factor in zip(*parts, totals, strict=True):
        s = state[: value.shape[0]]
        before.copy_(s)
        torch.bmm(inv, torch.baddbmm(value, r, s, alpha=-1), out=new)
        if factor is not None:
            s.mul_(factor)
        s.baddbmm_(w, new)
    return written


def _scan_backward(
    d_written: Tensor,
    d_direct: Tensor,
    read: Tensor,
    write: Tensor,
    inverse: Tensor,
    total: Tensor | None,
    d_state: Tensor,
    steps: list[int],
) -> tuple[Tensor, Tensor]:
    """Reverse of ``_scan``: gradients of ``z`` and of the states after chunks; ``d_state`` becomes that of the states
    before the first. ``d_direct`` are gradients of the states before chunks from outputs; ``d_written`` is
    overwritten."""
    dh = torch.empty_like(d_direct)
    dz = torch.empty_like(d_written)
    totals = total.unsqueeze(-1).split(steps) if total is not None else [None] * len(steps)
    parts = [t.split(steps) for t in (d_written, d_direct, read.mT, write, inverse.mT, dh, dz)]
    for d_new, direct, r, w, inv, after, out, factor in zip(
        *(reversed(part) for part in (*parts, totals)), strict=True
    ):
        ds = d_state[: d_new.shape[0]]
        after.copy_(ds)
        torch.bmm(inv, d_new.baddbmm_(w, ds), out=out)
        if factor is not None:
            ds.mul_(factor)
        ds.add_(direct).baddbmm_(r, out, alpha=-1)
    return dz, dh


class _Kept(NamedTuple):
    """What the forward pass keeps of a slab: scores ``[X, 2, C, C]``, the inverse, written values ``[X, C, V]``, states
    before chunks, and with decay its factors from the start and to the end of the chunk. ``dense`` are those between
    tokens, None where they differ per channel."""

    scores: Tensor
    inverse: Tensor
    written: Tensor
    h: Tensor
    head: Tensor | None
    tail: Tensor | None
    dense: Tensor | None


class _DeltaChunks(torch.autograd.Function):
    """``(state [N, K, V], steps, scale, exclusive, *_Chunks)`` to outputs ``[X, C, V]``, final states and (no gradient)
    states before chunks ``[X, K, V]``."""

    @staticmethod
    @without_autocast
    def forward(
        ctx: Any, state: Tensor, steps: list[int], scale: float, exclusive: bool, *operands: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = _Chunks(*operands)  # type: ignore[arg-type]
        (X, C, K), V = x.q.shape, x.value.shape[-1]
        o, h, final = torch.empty_like(x.value), x.q.new_empty(X, K, V), state.clone()
        dense = tree = None
        if x.g is None:
            dense = x.q.new_ones(1, 1, C, C).tril_().expand(X, 1, C, C)
        elif x.g.shape[-1] != K:
            # One number per token is little: climb once for all chunks.
            tree = DecayTree(x.g)
            dense = dense_factors(tree, exclusive)
        slabs = _slabs(steps, C * max(K, V), x.q.device)
        kept: list[Tensor | None] = []
        for part, run in slabs:
            p = x.part(part)
            rows = p.query_and_read()
            if dense is not None:
                factors = dense[part]
                scores = dense_scores(rows, p.write, factors)
                head, tail = (None, None) if tree is None else (tree.head[part], tree.tail[part])
            else:
                assert p.g is not None
                climbed = DecayTree(p.g)
                factors, scores = None, channelwise_scores(rows, p.write, climbed, exclusive)
                head, tail = climbed.head, climbed.tail
            inverse = unit_lower_inverse(scores[:, 1])
            rows = _decayed_rows(rows, head, exclusive)
            z, w = _times(p.value, p.gain), _times(p.write, tail)
            written = _scan(z, rows[:, 1], w, inverse, _total(head), final, run, h[part])
            torch.bmm(scores[:, 0], written, out=o[part]).baddbmm_(rows[:, 0], h[part]).mul_(scale)
            kept += _Kept(scores, inverse, written, h[part], head, tail, factors)
        ctx.slabs, ctx.scale, ctx.exclusive = slabs, scale, exclusive
        ctx.save_for_backward(*x, *kept)
        ctx.probes = probes(state)
        ctx.mark_non_differentiable(h)
        return o, final, h

    @staticmethod
    @once
    @without_autocast
    def backward(ctx: Any, do: Tensor, d_final: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        n, m = len(_Chunks._fields), len(_Kept._fields)
        saved = ctx.saved_tensors  # once: checkpointing unpacks them a single time
        x = _Chunks(*saved[:n])
        d_state = d_final.clone(memory_format=torch.contiguous_format)
        grads = _Chunks(*(None if t is None else torch.empty_like(t) for t in x))  # type: ignore[arg-type]
        for i, (part, run) in reversed(list(enumerate(ctx.slabs))):
            kept = _Kept(*saved[n + m * i : n + m * (i + 1)])
            scaled = do[part] * ctx.scale
            _slab_backward(x.part(part), kept, scaled, d_state, run, ctx.exclusive, grads.part(part))
        return d_state, None, None, None, *grads


def _slab_backward(
    x: _Chunks, kept: _Kept, do: Tensor, d_state: Tensor, steps: list[int], exclusive: bool, out: _Chunks
) -> None:
    """Gradients of a slab into ``out``; ``d_state``, of the states after it, becomes that of the states before."""
    n, C, K = x.q.shape
    rows = x.query_and_read()
    started, ended = _decayed_rows(rows, kept.head, exclusive), _times(x.write, kept.tail)
    d_written, d_direct = torch.bmm(kept.scores[:, 0].mT, do), torch.bmm(started[:, 0].mT, do)
    dz, dh = _scan_backward(d_written, d_direct, started[:, 1], ended, kept.inverse, _total(kept.head), d_state, steps)
    # Outputs and, with the other sign, what is written meet the same operands.
    d_values = do.new_empty(n, 2, *do.shape[1:])
    d_values[:, 0] = do
    torch.neg(dz, out=d_values[:, 1])
    d_values = d_values.view(n, 2 * C, -1)
    d_scores = torch.bmm(d_values, kept.written.mT).view(n, 2, C, C)
    d_started = torch.bmm(d_values, kept.h.mT).view(n, 2, C, K)
    d_ended = torch.bmm(kept.written, dh.mT)
    if kept.head is None or kept.tail is None:
        assert kept.dense is not None
        d_rows, dw = d_started, d_ended
        dense_backward(d_scores, rows, x.write, kept.dense, d_rows, dw)
    else:
        assert x.g is not None
        assert out.g is not None
        heads = for_rows(kept.head, exclusive)
        d_total = (kept.h * dh).sum(-1).mul_(kept.head[:, -1])
        if kept.dense is not None:
            d_head = from_rows((d_started * started).sum(-1, True), exclusive)
            d_tail = (d_ended * ended).sum(-1, True)
            dg = dense_decay_gradient(d_scores * kept.scores, exclusive, d_head, d_tail, d_total.sum(-1, True))
            d_rows, dw = d_started.mul_(heads), d_ended.mul_(kept.tail)
            dense_backward(d_scores, rows, x.write, kept.dense, d_rows, dw)
        else:
            d_rows, dw, levels = channelwise_backward(d_scores, rows, x.write, DecayTree(x.g), exclusive)
            d_rows.addcmul_(d_started, heads)
            dw.addcmul_(d_ended, kept.tail)
            gradient = DecayGradient(from_rows(d_started.mul_(started), exclusive), d_ended.mul_(ended), d_total)
            for level in reversed(levels):
                gradient.descend(*level)
            dg = gradient.head
        out.g.copy_(dg)
    out.q.copy_(d_rows[:, 0])
    d_read = d_rows[:, 1]
    _gradient_of_factor(d_read, x.write if x.read is None else x.read, out.erase)
    if out.read is not None:
        _multiply(d_read, x.erase, out.read)
        out.write.copy_(dw)
    elif x.erase is not None:
        torch.addcmul(dw, d_read, x.erase, out=out.write)
    else:
        torch.add(dw, d_read, out=out.write)
    _gradient_of_factor(dz, x.value, out.gain)
    _multiply(dz, x.gain, out.value)


def _times(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor


def _multiply(x: Tensor, factor: Tensor | None, out: Tensor) -> None:
    if factor is None:
        out.copy_(x)
    else:
        torch.mul(x, factor, out=out)


def _gradient_of_factor(d_product: Tensor, other: Tensor, out: Tensor | None) -> None:
    """Gradient of a factor ``[X, C, 1 or D]`` of ``other [X, C, D]``, if it is asked for."""
    if out is None:
        return
    if out.shape[-1] == other.shape[-1]:
        torch.mul(d_product, other, out=out)
    else:
        torch.sum(d_product * other, -1, keepdim=True, out=out)


def _decayed_rows(rows: Tensor, head: Tensor | None, exclusive: bool) -> Tensor:
    return rows if head is None else rows * for_rows(head, exclusive)


def _total(head: Tensor | None) -> Tensor | None:
    return None if head is None else head[:, -1]


def _fold(x: Tensor, plan: ChunkPlan, HV: int, dtype: torch.dtype) -> Tensor:
    """``[B, T, H, D]`` as contiguous chunks ``[M * HV, C, D]`` in ``dtype``, heads repeated over value groups."""
    chunks = plan.pack(x).to(dtype).transpose(1, 2)
    if (H := chunks.shape[1]) != HV:
        chunks = chunks.repeat_interleave(HV // H, 1)
    return chunks.reshape(-1, plan.chunk, chunks.shape[-1]).contiguous()


def _empty(
    x: Operands, plan: ChunkPlan, initial_state: Tensor | None, state: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Results where an axis other than time has no length: zeros, as part of the graph."""
    value = x.value.to(compute_dtype(x.q.dtype))
    o = value.masked_fill(torch.ones_like(value, dtype=torch.bool), 0)
    HV = value.shape[2]
    final = (
        value.new_zeros(plan.sequences, HV, *state) if initial_state is None else initial_state.to(o.dtype, copy=True)
    )
    return o, final, plan.chunk_states(value.new_zeros(plan.chunks, HV, *state))


def chunk_delta(
    row: DeltaRow,
    x: Operands,
    *,
    scale: float,
    initial_state: Tensor | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_size: int = CHUNK,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute an op of the family in chunks.

    Args:
        row: the op.
        x: activated operands; decay in natural log.
        scale: factor of the outputs.
        initial_state: ``[N, HV, K, V]``, or ``[N, HV, V, K]`` with ``state_v_first``.
        state_v_first: layout of all states.
        cu_seqlens: sequence offsets of packed inputs.
        cu_seqlens_cpu: their copy on the CPU.
        chunk_size: tokens per chunk, a power of two.

    Returns:
        Outputs ``[B, T, HV, V]`` and final states ``[N, HV, K, V]`` in the dtype of computation, and (no gradient) the
        states before chunks, ``[B, NT, HV, K, V]`` or ``[1, M, HV, K, V]`` in sequence order for packed inputs.
    """
    B, T, HV, V = x.value.shape
    K = x.q.shape[-1]
    dtype = compute_dtype(x.q.dtype)
    plan = plan_chunks(B, T, chunk_size, x.q.device, cu_seqlens, cu_seqlens_cpu)
    if 0 in (B, HV, K, V):
        return _empty(x, plan, initial_state, (V, K) if state_v_first else (K, V))

    columns = lambda c: c if c.dim() == 4 else c.unsqueeze(-1)
    fold = lambda c: None if c is None else _fold(columns(c), plan, HV, dtype)
    erase = fold(x.erase)
    chunks = _Chunks(
        q=_fold(x.q, plan, HV, dtype),
        write=_fold(x.write, plan, HV, dtype),
        value=_fold(x.value, plan, HV, dtype),
        read=None if x.read is x.write else _fold(x.read, plan, HV, dtype),
        erase=erase,
        gain=erase if x.gain is x.erase else fold(x.gain),
        g=fold(x.decay) if row.decay is not Decay.NONE else None,
    )
    if initial_state is None:
        state = chunks.q.new_zeros(plan.sequences * HV, K, V)
    else:
        state = plan.sort_states(initial_state).to(dtype)
        state = (state.mT if state_v_first else state).reshape(-1, K, V).contiguous()
    steps = [n * HV for n in plan.steps]
    o, final, h = _DeltaChunks.apply(state, steps, scale, row.read_time is ReadTime.EXCLUSIVE, *chunks)
    o = plan.unpack(o.view(-1, HV, plan.chunk, V).transpose(1, 2))
    final, h = plan.unsort_states(final.view(-1, HV, K, V)), plan.chunk_states(h.view(-1, HV, K, V))
    if state_v_first:
        final, h = final.mT.contiguous(), h.mT.contiguous()
    return o, final, h


def fitting_chunk(T: int, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None) -> int:
    """Chunk size for sequences: ``CHUNK``, or the next power of two when all are shorter."""
    longest = longest_sequence(T, cu_seqlens, cu_seqlens_cpu)
    return min(CHUNK, 1 << max(0, longest - 1).bit_length())
