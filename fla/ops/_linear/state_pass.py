# SPDX-License-Identifier: MIT
"""The pass over chunks of the linear family: states from chunk increments, and its adjoint."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fla.ops._common.varlen import ChunkPlan

__all__ = ["pass_gradients", "pass_states"]


def pass_states(
    plan: ChunkPlan, increments: Tensor, decay: Tensor | None, initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``S_end = decay * S_start + increment`` through the chunks of every sequence.

    Args:
        plan: the order of the chunks.
        increments: what each chunk adds, ``[M, H, K, V]``.
        decay: what each chunk leaves of the state, broadcastable to `increments`; None: all of it.
        initial: ``[N, H, K, V]`` in the plan's order, or None for zero.

    Returns:
        The state at the start of each chunk ``[M, H, K, V]`` and at the end of each sequence ``[N, H, K, V]``.
    """
    starts = torch.empty_like(increments)
    shape = (plan.sequences, *increments.shape[1:])
    state = increments.new_zeros(shape) if initial is None else initial.clone(memory_format=torch.contiguous_format)
    steps = plan.steps
    for start, add, keep in zip(starts.split(steps), increments.split(steps), _split(decay, steps), strict=True):
        live = state[: start.shape[0]]
        start.copy_(live)
        _advance(live, add, keep)
    return starts, state


def pass_gradients(
    plan: ChunkPlan, increments: Tensor, decay: Tensor | None, final: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The adjoint of :func:`pass_states`, right to left.

    Args:
        plan: the order of the chunks.
        increments: gradient that the outputs of each chunk send to its starting state, ``[M, H, K, V]``.
        decay: as in :func:`pass_states`.
        final: gradient of the states at the end of each sequence ``[N, H, K, V]``, or None.

    Returns:
        The gradient at the end of each chunk ``[M, H, K, V]`` and at the start of each sequence ``[N, H, K, V]``.
    """
    ends = torch.empty_like(increments)
    shape = (plan.sequences, *increments.shape[1:])
    grad = increments.new_zeros(shape) if final is None else final.clone(memory_format=torch.contiguous_format)
    steps = plan.steps
    parts = (ends.split(steps), increments.split(steps), _split(decay, steps))
    for end, add, keep in zip(*(reversed(part) for part in parts), strict=True):
        live = grad[: end.shape[0]]
        end.copy_(live)
        _advance(live, add, keep)
    return ends, grad


def _split(decay: Tensor | None, steps: Sequence[int]) -> Sequence[Tensor | None]:
    return [None] * len(steps) if decay is None else decay.split(steps)


def _advance(state: Tensor, increment: Tensor, decay: Tensor | None) -> None:
    if decay is None:
        state.add_(increment)
    else:
        torch.addcmul(increment, state, decay, out=state)
