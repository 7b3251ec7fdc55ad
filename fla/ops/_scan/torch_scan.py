# SPDX-License-Identifier: MIT
"""The elementwise recurrence ``h_t = exp(g_t) h_{t-1} + x_t`` in PyTorch, with gradients of everything.

Only products of decays are formed, never quotients or differences of logarithms, so any gate is exact: minus infinity
is an ordinary zero. Narrow inputs are cut into chunks that are scanned side by side: once for what each chunk adds to
the state it starts from, then, with the states passed from chunk to chunk, for the result. Wide inputs fill a vector
unit by themselves and are scanned as they are. Float32 arithmetic, float64 for float64 inputs.

Source: Blelloch, "Prefix Sums and Their Applications" (1990), for first-order recurrences in two levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fla.ops._common.gates import compute_dtype, without_autocast
from fla.ops._common.single import once
from fla.ops._common.varlen import ChunkPlan, longest_sequence, plan_chunks

__all__ = ["linear_scan", "plan_scan", "scan_back"]

CHUNK = 64
# Numbers per token from which on one token at a time is faster than chunks side by side (2-core x86, torch 2.13).
WIDE = 1 << 11


def _pass(
    total: Tensor, added: Tensor, state: Tensor, steps: Sequence[int], backward: bool = False
) -> tuple[Tensor, Tensor]:
    """``S = total * S + added`` from chunk to chunk: what each chunk ``[M, D]`` starts from, and the last ``[N, D]``;
    from the last chunk to the first with ``backward``."""
    starts, state = torch.empty_like(added), state.clone(memory_format=torch.contiguous_format)
    parts: Any = zip(starts.split(steps), total.split(steps), added.split(steps), strict=True)
    for start, factor, add in reversed(list(parts)) if backward else parts:
        live = state[: start.shape[0]]
        start.copy_(live)
        torch.addcmul(add, factor, live, out=live)
    return starts, state


def passes(steps: Sequence[int], state: Tensor) -> bool:
    """Whether states are passed on: from chunk to chunk, or by empty sequences."""
    return len(steps) > 1 or steps[0] < state.shape[0]


def scan_back(
    a: Tensor, total: Tensor | None, do: Tensor, d_final: Tensor, steps: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The adjoint of the recurrence: ``dh_t = do_t + a_{t+1} dh_{t+1}`` from the last chunk to the first.

    Args:
        a: decays ``[M, C, D]``.
        total: their products over chunks ``[M, D]``; may be None where no states are passed on.
        do: gradients of outputs ``[M, C, D]``.
        d_final: gradients of final states ``[N, D]``.
        steps: number of chunks in each step.

    Returns:
        ``dh [M, C, D]``, and the gradients of the initial states ``[N, D]``.
    """
    C = do.shape[1]
    ends, d_state = d_final, None
    if passes(steps, d_final):
        assert total is not None
        d_start = torch.zeros_like(total)
        for c in range(C - 1, -1, -1):
            d_start.add_(do[:, c]).mul_(a[:, c])
        ends, d_state = _pass(total, d_start, d_final, steps, backward=True)
    dh = torch.empty_like(a)
    carried = ends.clone(memory_format=torch.contiguous_format)
    for c in range(C - 1, -1, -1):
        torch.add(do[:, c], carried, out=dh[:, c])
        torch.mul(a[:, c], dh[:, c], out=carried)
    return dh, carried if d_state is None else d_state


def plan_scan(
    B: int, T: int, D: int, device: torch.device, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None = None
) -> ChunkPlan:
    """Chunks for a scan of ``[B, T, D]``."""
    chunk = T
    if cu_seqlens is not None or B * D < WIDE:
        chunk = min(CHUNK, longest_sequence(T, cu_seqlens, cu_seqlens_cpu))
    return plan_chunks(B, T, max(1, chunk), device, cu_seqlens, cu_seqlens_cpu)


class _Scan(torch.autograd.Function):
    """``(x [M, C, D], g [M, C, D], state [N, D], steps) -> (h [M, C, D], final [N, D])`` over chunks in step order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, g: Tensor, state: Tensor, steps: Sequence[int]) -> tuple[Tensor, Tensor]:
        a = g.exp()
        C = x.shape[1]
        total = None
        starts = state
        if passes(steps, state):
            total, added = a[:, 0].clone(), x[:, 0].clone()
            for c in range(1, C):
                total *= a[:, c]
                torch.addcmul(x[:, c], a[:, c], added, out=added)
            starts, final = _pass(total, added, state, steps)
        h = torch.empty_like(x)
        last = starts
        for c in range(C):
            last = torch.addcmul(x[:, c], a[:, c], last, out=h[:, c])
        ctx.save_for_backward(a, h, starts, total)
        ctx.steps = steps
        return h, last.clone() if total is None else final

    @staticmethod
    @once
    @without_autocast
    def backward(ctx: Any, do: Tensor, d_final: Tensor) -> tuple[Tensor | None, ...]:
        a, h, starts, total = ctx.saved_tensors
        dh, d_state = scan_back(a, total, do, d_final, ctx.steps)
        dg = a * dh
        dg[:, 0] *= starts
        dg[:, 1:] *= h[:, :-1]
        return dh, dg, d_state, None


def linear_scan(
    x: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Scan sequences, differentiably. Arguments are already validated.

    Args:
        x: ``[B, T, D]``.
        g: log decay (natural) ``[B, T, D]``.
        initial_state: ``[N, D]``; zeros if None.
        cu_seqlens: offsets ``[N + 1]`` of packed sequences (``B = 1``).
        cu_seqlens_cpu: their copy on the CPU.

    Returns:
        ``h [B, T, D]`` and the final states ``[N, D]``, float32 (float64 for float64 ``x``).
    """
    B, T, D = x.shape
    dtype = compute_dtype(x.dtype)
    plan = plan_scan(B, T, D, x.device, cu_seqlens, cu_seqlens_cpu)
    if initial_state is None:
        state = x.new_zeros(plan.sequences, D, dtype=dtype)
    else:
        state = plan.sort_states(initial_state.to(dtype))
    if not plan.steps:  # no tokens
        h, final = x.to(dtype), state if initial_state is None else state.clone()
    else:
        h, final = _Scan.apply(plan.pack(x.to(dtype)), plan.pack(g.to(dtype)), state, plan.steps)
        h = plan.unpack(h)
    return h, plan.unsort_states(final)
