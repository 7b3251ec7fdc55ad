# SPDX-License-Identifier: MIT
"""The running ``logaddexp`` over time in PyTorch: ``z_t = log(exp(z_{t-1}) + exp(x_t))``, differentiable.

Minus infinity stands for nothing seen yet, in ``x`` as in states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fla.ops._common.ends import first_and_last, the_token_before
from fla.ops._common.gates import compute_dtype, without_autocast
from fla.ops._common.single import once
from fla.ops._scan.torch_scan import plan_scan, scan_back

__all__ = ["log_scan"]


class _LogScan(torch.autograd.Function):
    """``(x [M, C, D], state [N, D], steps) -> (z [M, C, D], final [N, D])`` over chunks in step order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, state: Tensor, steps: Sequence[int]) -> tuple[Tensor, Tensor]:
        z = x.logcumsumexp(1)
        starts, final = torch.empty_like(x[:, 0]), state.clone(memory_format=torch.contiguous_format)
        for start, last in zip(starts.split(steps), z[:, -1].split(steps), strict=True):
            live = final[: start.shape[0]]
            start.copy_(live)
            torch.logaddexp(live, last, out=live)
        z = torch.logaddexp(z, starts.unsqueeze(1))
        ctx.save_for_backward(x, z, starts)
        ctx.steps = steps
        return z, final

    @staticmethod
    @once
    @without_autocast
    def backward(ctx: Any, dz: Tensor, d_final: Tensor) -> tuple[Tensor | None, ...]:
        x, z, starts = ctx.saved_tensors
        before = torch.cat([starts.unsqueeze(1), z[:, :-1]], 1)
        # What is nothing has no share, not even in a sum of nothing.
        share = lambda part: (part - z).exp().masked_fill(part == -torch.inf, 0.0)
        a = share(before)
        dz, d_state = scan_back(a, a.prod(1), dz, d_final, ctx.steps)
        return dz.mul_(share(x)), d_state, None


def log_scan(
    x: Tensor, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Scan sequences, differentiably. Arguments are already validated.

    Args:
        x: ``[B, T, D]``.
        initial_state: ``[N, D]``; minus infinity if None.
        cu_seqlens: offsets ``[N + 1]`` of packed sequences (``B = 1``).

    Returns:
        ``z [B, T, D]``, the value before each token ``[B, T, D]`` and after the last one ``[N, D]``, in float32
        (float64 for float64 ``x``).
    """
    B, T, D = x.shape
    x = x.to(compute_dtype(x.dtype))
    plan = plan_scan(B, T, D, x.device, cu_seqlens)
    if initial_state is None:
        state = x.new_full((plan.sequences, D), -torch.inf)
    else:
        initial_state = initial_state.to(x.dtype)
        state = plan.sort_states(initial_state)
    if not plan.steps:  # no tokens
        return x, x, plan.unsort_states(state.clone())
    packed = plan.pack(x)
    if plan.chunks * plan.chunk > B * T:
        padding = plan.pack(x.new_ones(B, T, 1)) == 0
        packed = packed.masked_fill(padding, -torch.inf)
    z, final = _LogScan.apply(packed, state, plan.steps)
    z = plan.unpack(z)
    first, _, live = first_and_last(T, x.device, cu_seqlens)
    return z, the_token_before(z, initial_state, -torch.inf, first, live), plan.unsort_states(final)
