# SPDX-License-Identifier: MIT
"""The linear family on any torch device: one chunked engine with autograd for every gate.

``S_t = diag(e^(g_t + gk_t)) S_{t-1} diag(e^gv_t) + k_t (x) v_t``, ``o_t = scale q_t S_t``. Products, states and gates
are float32, and float64 for float64 inputs. Nothing here is atomic, so equal calls give equal bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fla.ops._common.gates import compute_dtype, without_autocast
from fla.ops._common.varlen import ChunkPlan, host_offsets, longest_sequence, plan_chunks
from fla.ops._linear.layout import to_chunks, to_tokens
from fla.ops._linear.torch_recurrent import step
from fla.ops._linear.torch_scalar import ScalarChunks
from fla.ops._linear.torch_vector import VectorChunks

__all__ = ["linear_attention"]

CHUNK, SMALLEST = 64, 16  # Powers of two.


@without_autocast
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run the recurrence over ``[B, T, H, *]`` inputs. Arguments are already validated.

    Args:
        q, k: ``[B, T, H, K]``.
        v: ``[B, T, H, V]``.
        scale: factor of the output; None for ``K ** -0.5``.
        g: log decay per head and token ``[B, T, H]``.
        g_gamma: log decay per head ``[H]``; no gradient.
        gk: log decay per key channel ``[B, T, H, K]``.
        gv: log decay per value channel ``[B, T, H, V]``.
        initial_state: ``[N, H, K, V]``, or ``[N, H, V, K]`` with `state_v_first`; any float.
        output_final_state: whether to return the final states.
        reverse: run from the last token of each sequence to the first.
        state_v_first: layout of both states.
        cu_seqlens: boundaries of N packed sequences ``[N + 1]``; None: N = B.
        cu_seqlens_cpu: their copy on the host, which saves waiting for the device.

    Returns:
        ``o`` ``[B, T, H, V]`` in the dtype of `q`, and the final states in float32 (float64 for float64) or None.
    """
    dtype = compute_dtype(q.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if g_gamma is not None:
        g = _plus(g_gamma.detach().expand(q.shape[:3]), g, dtype)
    if g is not None and gv is not None:
        gv, g = _plus(gv, g.unsqueeze(-1), dtype), None
    elif g is not None and gk is not None:
        gk, g = _plus(gk, g.unsqueeze(-1), dtype), None
    inputs: list[Tensor | None] = [q, k, v, g, gk, gv]
    time = _only_tokens(q.shape[1], cu_seqlens, cu_seqlens_cpu)
    if time is not None:
        # Every sequence is one token: each row of the other axis is a step of its own.
        return _decode(inputs, time, scale, initial_state, output_final_state, state_v_first)
    state = initial_state
    if reverse:
        inputs = [None if x is None else x.flip(1) for x in inputs]
        if cu_seqlens is not None:
            # The last sequence comes first now.
            cu_seqlens, cu_seqlens_cpu = (
                None if x is None else q.shape[1] - x.flip(0) for x in (cu_seqlens, cu_seqlens_cpu)
            )
            state = None if state is None else state.flip(0)
    size = _chunk_size(longest_sequence(q.shape[1], cu_seqlens, cu_seqlens_cpu))
    plan = plan_chunks(q.shape[0], q.shape[1], size, q.device, cu_seqlens, cu_seqlens_cpu)
    if state is not None:
        state = plan.sort_states(state.to(dtype))
        state = state.mT if state_v_first else state
    out, final = _chunks(plan, scale, [None if x is None else to_chunks(x, plan, dtype) for x in inputs], state)
    o = to_tokens(out, plan, q.dtype)
    o = o.flip(1) if reverse else o
    if not output_final_state:
        return o, None
    final = plan.unsort_states(final)
    if reverse and cu_seqlens is not None:
        final = final.flip(0)
    return o, final.mT.contiguous() if state_v_first else final


def _only_tokens(T: int, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None) -> int | None:
    """The axis of time (of length 1), or of packed tokens, when no sequence is longer than one token; else None."""
    if cu_seqlens is None:
        return 1 if T == 1 else None
    if cu_seqlens.shape[0] != T + 1 or T == 0:
        return None
    return 0 if host_offsets(cu_seqlens, cu_seqlens_cpu) == tuple(range(T + 1)) else None


def _decode(
    inputs: list[Tensor | None],
    time: int,
    scale: float,
    state: Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
) -> tuple[Tensor, Tensor | None]:
    q, k, v, g, gk, gv = (None if x is None else x.squeeze(time) for x in inputs)
    assert q is not None
    assert k is not None
    assert v is not None
    o, new = step(q, k, v, scale=scale, g=g, gk=gk, gv=gv, state=state, state_v_first=state_v_first)
    return o.unsqueeze(time), new if output_final_state else None


def _chunk_size(longest: int) -> int:
    return min(CHUNK, max(SMALLEST, 1 << max(0, longest - 1).bit_length()))


def _plus(gate: Tensor, other: Tensor | None, dtype: torch.dtype) -> Tensor:
    return gate.to(dtype) if other is None else gate.to(dtype) + other.to(dtype)


def _chunks(plan: ChunkPlan, scale: float, packed: list[Tensor | None], state: Tensor | None) -> tuple[Tensor, Tensor]:
    q, k, v, g, gk, gv = packed
    if gk is None and gv is None:
        return ScalarChunks.apply(plan, scale, q, k, v, g, state)
    return VectorChunks.apply(plan, scale, q, k, v, gk, gv, state)
