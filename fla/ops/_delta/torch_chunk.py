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

from typing import Any

import torch
from torch import Tensor

from fla.ops._common.gates import compute_dtype, without_autocast
from fla.ops._common.varlen import ChunkPlan, longest_sequence, plan_chunks
from fla.ops._delta.rows import Decay, DeltaRow, Operands, ReadTime
from fla.ops._delta.torch_decay import decay_gradient, grow, shift, unshift
from fla.ops._delta.torch_scores import Scores, scores, scores_backward, unit_lower_inverse

CHUNK = 64
# Elements of one operand that the backward pass works on at a time.
_SLICE_CPU, _SLICE = 1 << 17, 1 << 24


def _scan(
    z: Tensor, Rg: Tensor, Kg: Tensor, inverse: Tensor, total: Tensor | None, state: Tensor, steps: list[int]
) -> tuple[Tensor, Tensor]:
    """Pass ``state [N, K, V]`` (updated in place) through the chunks; returns states before chunks and written
    values."""
    h = z.new_empty(z.shape[0], *state.shape[1:])
    written = torch.empty_like(z)
    totals = total.unsqueeze(-1).split(steps) if total is not None else [None] * len(steps)
    parts = [t.split(steps) for t in (z, Rg, Kg.mT, inverse, h, written)]
    for value, read, kg, inv, before, new, factor in zip(*parts, totals, strict=True):
        s = state[: value.shape[0]]
        before.copy_(s)
        torch.bmm(inv, torch.baddbmm(value, read, s, alpha=-1), out=new)
        if factor is not None:
            s.mul_(factor)
        s.baddbmm_(kg, new)
    return h, written


def _scan_backward(
    d_written: Tensor,
    d_direct: Tensor,
    Rg: Tensor,
    Kg: Tensor,
    inverse: Tensor,
    total: Tensor | None,
    d_state: Tensor,
    steps: list[int],
) -> tuple[Tensor, Tensor]:
    """Reverse of ``_scan``: gradients of ``z`` and of the states after chunks; ``d_state`` becomes that of the initial
    states. ``d_direct`` are gradients of the states before chunks from outputs; ``d_written`` is overwritten."""
    dh = torch.empty_like(d_direct)
    dz = torch.empty_like(d_written)
    totals = total.unsqueeze(-1).split(steps) if total is not None else [None] * len(steps)
    parts = [t.split(steps) for t in (d_written, d_direct, Rg.mT, Kg, inverse.mT, dh, dz)]
    for d_new, direct, read, kg, inv, after, d_value, factor in zip(
        *(reversed(part) for part in (*parts, totals)), strict=True
    ):
        ds = d_state[: d_new.shape[0]]
        after.copy_(ds)
        torch.bmm(inv, d_new.baddbmm_(kg, ds), out=d_value)
        if factor is not None:
            ds.mul_(factor)
        ds.add_(direct).baddbmm_(read, d_value, alpha=-1)
    return dz, dh


class _DeltaChunks(torch.autograd.Function):
    """The chunk form on ``X`` chunks in step order: ``q, r, w [X, C, K]``, ``z [X, C, V]``, ``g [X, C, 1 or K]`` or
    None, ``state [N, K, V]``. Returns outputs ``[X, C, V]``, final states and states before chunks ``[X, K, V]``."""

    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        q: Tensor,
        r: Tensor,
        w: Tensor,
        z: Tensor,
        g: Tensor | None,
        state: Tensor,
        steps: list[int],
        exclusive: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        tree = grow(g) if g is not None else None
        s = scores(q, r, w, tree, exclusive)
        inverse = unit_lower_inverse(s.L)
        Rg, Qg, Kg = r, q, w
        head = tail = total = None
        if tree is not None:
            head, tail, total = tree.head, tree.tail, tree.total
            Rg, Qg, Kg = r * (shift(head, 1.0) if exclusive else head), q * head, w * tail
        final = state.clone()
        h, written = _scan(z, Rg, Kg, inverse, total, final, steps)
        o = torch.bmm(s.A, written).baddbmm_(Qg, h)
        ctx.save_for_backward(q, r, w, g, head, tail, s.A, s.L, inverse, h, written)
        ctx.steps, ctx.exclusive = steps, exclusive
        ctx.mark_non_differentiable(h)
        return o, final, h

    @staticmethod
    @torch.autograd.function.once_differentiable
    @without_autocast
    def backward(ctx: Any, do: Tensor, d_final: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, r, w, g, head, tail, A, L, inverse, h, written = ctx.saved_tensors
        exclusive = ctx.exclusive
        Rg, Qg, Kg = r, q, w
        if g is not None:
            Rg, Qg, Kg = r * (shift(head, 1.0) if exclusive else head), q * head, w * tail
        do = do.contiguous()
        d_state = d_final.clone(memory_format=torch.contiguous_format)
        total = head[:, -1] if g is not None else None
        d_written, d_direct = torch.bmm(A.mT, do), torch.bmm(Qg.mT, do)
        dz, dh = _scan_backward(d_written, d_direct, Rg, Kg, inverse, total, d_state, ctx.steps)
        dq, dr, dw = torch.empty_like(q), torch.empty_like(r), torch.empty_like(w)
        dg = torch.empty_like(g) if g is not None else None
        # What is left concerns one chunk at a time: few enough at once that their intermediates stay in cache.
        n = max(1, (_SLICE_CPU if q.device.type == "cpu" else _SLICE) // q[0].numel()) if q.shape[0] else 1
        for a in range(0, q.shape[0], n):
            part: list[Any] = [None if t is None else t[a : a + n] for t in (q, r, w, g, A, L, h, written, do, dz, dh)]
            for out, gradient in zip((dq, dr, dw, dg), _chunk_gradients(exclusive, *part), strict=True):
                if out is not None and gradient is not None:
                    out[a : a + n] = gradient
        return dq, dr, dw, dz, dg, d_state, None, None


def _chunk_gradients(
    exclusive: bool,
    q: Tensor,
    r: Tensor,
    w: Tensor,
    g: Tensor | None,
    A: Tensor,
    L: Tensor,
    h: Tensor,
    written: Tensor,
    do: Tensor,
    dz: Tensor,
    dh: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of ``q, r, w, g`` once those of the written values (``dz``) and of states after chunks (``dh``) are
    known."""
    tree = grow(g) if g is not None else None
    dA, dL = torch.bmm(do, written.mT), torch.bmm(dz, written.mT).neg_()
    dQg, dRg, dKg = torch.bmm(do, h.mT), torch.bmm(dz, h.mT).neg_(), torch.bmm(written, dh.mT)
    d = scores_backward(Scores(A, L), dA, dL, q, r, w, tree, exclusive)
    if tree is None:
        return d.q + dQg, d.r + dRg, d.w + dKg, None
    read_head = shift(tree.head, 1.0) if exclusive else tree.head
    dq = torch.addcmul(d.q, dQg, tree.head)
    dr = torch.addcmul(d.r, dRg, read_head)
    dw = torch.addcmul(d.w, dKg, tree.tail)
    d_read = dRg.mul_(r * read_head)
    d_head = torch.addcmul(unshift(d_read) if exclusive else d_read, dQg, q * tree.head)
    d_tail = dKg.mul_(w * tree.tail)
    d_total = (h * dh).sum(-1) * tree.total
    if tree.head.shape[-1] != q.shape[-1]:
        d_head, d_tail, d_total = d_head.sum(-1, True), d_tail.sum(-1, True), d_total.sum(-1, True)
    d_head[:, -1] += d_total
    return dq, dr, dw, decay_gradient(d.levels, d_head, d_tail)


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

    q = _fold(x.q, plan, HV, dtype) * scale
    w = _fold(x.write, plan, HV, dtype)
    r = w if x.read is x.write else _fold(x.read, plan, HV, dtype)
    z = _fold(x.value, plan, HV, dtype)
    columns = lambda c: c if c.dim() == 4 else c.unsqueeze(-1)
    erase = _fold(columns(x.erase), plan, HV, dtype) if x.erase is not None else None
    gain = erase
    if x.gain is not x.erase:
        gain = _fold(columns(x.gain), plan, HV, dtype) if x.gain is not None else None
    r = r * erase if erase is not None else r
    z = z * gain if gain is not None else z
    g = _fold(columns(x.decay), plan, HV, dtype) if row.decay is not Decay.NONE and x.decay is not None else None

    if initial_state is None:
        state = q.new_zeros(plan.sequences * HV, K, V)
    else:
        state = plan.sort_states(initial_state).to(dtype)
        state = (state.mT if state_v_first else state).reshape(-1, K, V).contiguous()
    steps = [n * HV for n in plan.steps]
    o, final, h = _DeltaChunks.apply(q, r, w, z, g, state, steps, row.read_time is ReadTime.EXCLUSIVE)
    o = plan.unpack(o.view(-1, HV, plan.chunk, V).transpose(1, 2))
    final, h = plan.unsort_states(final.view(-1, HV, K, V)), plan.chunk_states(h.view(-1, HV, K, V))
    if state_v_first:
        final, h = final.mT.contiguous(), h.mT.contiguous()
    return o, final, h


def fitting_chunk(T: int, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None) -> int:
    """Chunk size for sequences: ``CHUNK``, or the next power of two when all are shorter."""
    longest = longest_sequence(T, cu_seqlens, cu_seqlens_cpu)
    return min(CHUNK, 1 << max(0, longest - 1).bit_length())
