# SPDX-License-Identifier: MIT
"""Empty results of the right shape, dtype and device: what a compiler needs to know about an op."""

from __future__ import annotations

import torch
from torch import Tensor

from fla.ops._common.gates import compute_dtype


def final_state_output(
    q: Tensor, v: Tensor, cu_seqlens: Tensor | None, output_final_state: bool, state_v_first: bool = False
) -> Tensor | None:
    """Final states ``[N, HV, K, V]`` (or V-first) of a call, or None."""
    if not output_final_state:
        return None
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    K, V = q.shape[-1], v.shape[-1]
    return q.new_empty((N, v.shape[2], *((V, K) if state_v_first else (K, V))), dtype=compute_dtype(q.dtype))


def chunk_outputs(
    q: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    output_final_state: bool,
    state_v_first: bool = False,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """``(o, final_state)``, and the states before chunks of ``chunk_size`` where one is given."""
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    final = final_state_output(q, v, cu_seqlens, output_final_state, state_v_first)
    if chunk_size is None:
        return o, final
    if cu_seqlens is not None:
        raise NotImplementedError(
            "return_intermediate_states=True with `cu_seqlens` cannot be compiled: the number of chunks is data."
        )
    B, T, HV, V = v.shape
    K = q.shape[-1]
    NT = (T + chunk_size - 1) // chunk_size
    return o, final, q.new_empty((B, NT, HV, *((V, K) if state_v_first else (K, V))))
