# SPDX-License-Identifier: MIT
"""Empty results of the right shape, dtype and device: what a compiler needs to know about an op.

Parameters carry the names of the ops' parameters, by which the framework fills them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fla.ops._common.gates import compute_dtype


def recurrent_outputs(
    q: Tensor,
    v: Tensor,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``(o, final_state)`` of ops that return no more."""
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    if not output_final_state:
        return o, None
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    K, V = q.shape[-1], v.shape[-1]
    state = (N, v.shape[2], *((V, K) if state_v_first else (K, V)))
    return o, q.new_empty(state, dtype=compute_dtype(q.dtype))


def k_first_outputs(
    q: Tensor, v: Tensor, output_final_state: bool = False, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """``(o, final_state)`` of ops with one state layout."""
    return recurrent_outputs(q, v, output_final_state, False, cu_seqlens)


def chunk_outputs(
    q: Tensor,
    v: Tensor,
    output_final_state: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """``(o, final_state)``, and the states before chunks where they are asked for."""
    o, final = recurrent_outputs(q, v, output_final_state, state_v_first, cu_seqlens)
    if not return_intermediate_states:
        return o, final
    if cu_seqlens is not None:
        raise NotImplementedError(
            "return_intermediate_states=True with `cu_seqlens` cannot be compiled: the number of chunks is data."
        )
    B, T, HV, V = v.shape
    K = q.shape[-1]
    NT = (T + chunk_size - 1) // chunk_size
    return o, final, q.new_empty((B, NT, HV, *((V, K) if state_v_first else (K, V))))
