# SPDX-License-Identifier: MIT
"""The linear family on any torch device: one chunked engine with autograd for every gate.

``S_t = diag(e^(g_t + gk_t)) S_{t-1} diag(e^gv_t) + k_t (x) v_t``, ``o_t = scale q_t S_t``. Products, states and gates are
float32, and float64 for float64 inputs. Nothing here is atomic, so equal calls give equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fla.ops._common.chunking import ChunkPlan, make_plan
from fla.ops._linear.torch_recurrent import step
from fla.ops._linear.torch_scalar import ScalarChunks
from fla.ops._linear.torch_vector import VectorChunks

__all__ = ["linear_attention"]


def _chunk_size(length: int) -> int:
    """Rows per chunk: 64, and less for shorter sequences; a power of two from 16 on."""
    return min(64, max(16, 1 << max(0, length - 1).bit_length()))


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
    offsets: Sequence[int] | None = None,
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
        offsets: boundaries of packed sequences, of which there are N; None: N = B.

    Returns:
        ``o`` ``[B, T, H, V]`` in the dtype of `q`, and the final states in float32 (float64 for float64) or None.
    """
    # Products of half-precision operands are not what is promised above.
    with torch.autocast(q.device.type, enabled=False):
        return _linear_attention(
            q,
            k,
            v,
            q.shape[-1] ** -0.5 if scale is None else scale,
            _sum(g, g_gamma, q),
            gk,
            gv,
            initial_state,
            output_final_state,
            reverse,
            state_v_first,
            offsets,
        )


def _sum(g: Tensor | None, g_gamma: Tensor | None, q: Tensor) -> Tensor | None:
    if g_gamma is None:
        return g
    fixed = g_gamma.detach().to(torch.float64 if q.dtype is torch.float64 else torch.float32)
    return fixed.expand(q.shape[:3]) if g is None else g + fixed


def _linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    g: Tensor | None,
    gk: Tensor | None,
    gv: Tensor | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    reverse: bool,
    state_v_first: bool,
    offsets: Sequence[int] | None,
) -> tuple[Tensor, Tensor | None]:
    B, T = q.shape[:2]
    one_each = T == 1 if offsets is None else B == 1 and len(offsets) == T + 1 and offsets == list(range(T + 1))
    if one_each:
        time = 1 if offsets is None else 0
        rows = (None if x is None else x.squeeze(time) if offsets is None else x[0] for x in (q, k, v, g, gk, gv))
        q1, k1, v1, g1, gk1, gv1 = rows
        assert q1 is not None and k1 is not None and v1 is not None
        o, final = step(
            q1, k1, v1, scale=scale, g=g1, gk=gk1, gv=gv1, state=initial_state, state_v_first=state_v_first
        )
        return o.unsqueeze(time), final if output_final_state else None

    longest = T if offsets is None else max((b - a for a, b in zip(offsets, offsets[1:], strict=False)), default=0)
    plan = make_plan(B, T, _chunk_size(longest), q.device, offsets, reverse)
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    if g is not None and gv is not None:
        g, gv = None, gv + g.unsqueeze(-1)
    elif g is not None and gk is not None:
        g, gk = None, gk + g.unsqueeze(-1)
    initial = None if initial_state is None else _state_in(plan, initial_state, dtype, state_v_first)
    packed = [plan.pack(x, dtype) for x in (q, k, v)]
    if gk is None and gv is None:
        out, final = ScalarChunks.apply(plan, scale, *packed, None if g is None else plan.pack(g, dtype), initial)
    else:
        gates = (None if x is None else plan.pack(x, dtype) for x in (gk, gv))
        out, final = VectorChunks.apply(plan, scale, *packed, *gates, initial)
    o = plan.unpack(out, q.dtype)
    return o, _state_out(plan, final, state_v_first) if output_final_state else None


def _state_in(plan: ChunkPlan, state: Tensor, dtype: torch.dtype, v_first: bool) -> Tensor:
    state = plan.pack_state(state.to(dtype))
    return state.mT if v_first else state


def _state_out(plan: ChunkPlan, state: Tensor, v_first: bool) -> Tensor:
    state = plan.unpack_state(state)
    return state.mT.contiguous() if v_first else state
