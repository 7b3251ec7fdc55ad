# SPDX-License-Identifier: MIT
"""Reading the state before a token instead of after it, with the engine as it is.

What token ``t`` reads exclusively is what token ``t - 1`` reads inclusively, so queries move back by one token, outputs
move forward by one, and only the first token of a sequence needs care: it reads the initial state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fla.ops._common.ends import first_and_last
from fla.ops._common.gates import compute_dtype, without_autocast
from fla.ops._linear.torch_chunk import linear_attention
from fla.ops._linear.torch_recurrent import step

__all__ = ["bonus_attention"]


@without_autocast
def bonus_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor,
    bonus: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``o_t = scale q_t (S_{t-1} + diag(bonus) k_t (x) v_t)``, ``S_t = diag(e^gk_t) S_{t-1} + k_t (x) v_t``.

    Args:
        bonus: weight of the token itself ``[H, K]``.

    The other arguments are those of :func:`fla.ops._linear.torch_chunk.linear_attention`. Returns ``o [B, T, H, V]``
    and the final states (or None) in float32, float64 for float64 inputs.
    """
    B, T, H, K = q.shape
    wide = q.to(compute_dtype(q.dtype)) * (K**-0.5 if scale is None else scale)
    own = (wide * k.to(wide.dtype) * bonus.to(wide.dtype)).sum(-1, keepdim=True) * v.to(wide.dtype)
    if T == 1 and cu_seqlens is None:  # decoding, without the moves
        _, new = step(wide[:, 0], k[:, 0], v[:, 0], scale=1.0, gk=gk[:, 0], state=initial_state)
        if initial_state is not None:
            own = own + torch.matmul(wide.transpose(1, 2), initial_state.to(wide.dtype)).transpose(1, 2)
        return own, new if output_final_state else None
    first, last, live = first_and_last(T, q.device, cu_seqlens, cu_seqlens_cpu, reverse)
    back = 1 if reverse else -1
    read, final = linear_attention(
        wide.roll(back, 1).index_fill(1, last, 0.0),
        k,
        v,
        scale=1.0,
        gk=gk,
        initial_state=initial_state,
        output_final_state=output_final_state,
        reverse=reverse,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
    )
    read = read.roll(-back, 1)
    if initial_state is None or T == 0:
        return own + read.index_fill(1, first, 0.0), final
    rows = wide.index_select(1, first)
    state = initial_state if live is None else initial_state.index_select(0, live)
    initial = torch.einsum("nhk,nhkv->nhv", rows.flatten(0, 1), state.to(wide.dtype))
    return own + read.index_copy(1, first, initial.view(B, len(first), H, v.shape[-1])), final
