# SPDX-License-Identifier: MIT
"""The normaliser of linear attention, and what its three ops share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fla.ops._common.gates import compute_dtype
from fla.ops._linear.op import state_outputs
from fla.ops._linear.torch_chunk import linear_attention

__all__ = ["EPS", "State", "normalize_with_z_state"]

EPS = 1e-10  # Added to every denominator, in float32.

State = Tensor | tuple[Tensor | None, Tensor | None]


def normalize_with_z_state(
    o: Tensor,
    q: Tensor,
    k: Tensor,
    scale: float,
    z_init: Tensor | None,
    reverse: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``o_t / (scale q_t . z_t + 1e-10)`` with ``z_t`` the running sum of keys.

    Args:
        o: outputs of linear attention ``[B, T, H, V]``.
        q, k: ``[B, T, H, K]``.
        scale: the factor that `o` was computed with.
        z_init: sum of the keys before the first token ``[N, 1, H, K]``, or None for zero.
        reverse: sum from the last token to the first.
        cu_seqlens: boundaries of packed sequences ``[N + 1]``, or None.

    Returns:
        The quotient in the dtype of o, and the sum of all keys ``[N, 1, H, K]`` in float32 (float64 for float64).
    """
    dtype = compute_dtype(q.dtype)
    # The denominator is linear attention over values of one, and its state is the sum of keys.
    denominator, z = linear_attention(
        q.to(dtype),
        k.to(dtype),
        k.new_ones((*k.shape[:3], 1), dtype=dtype),
        scale=scale,
        initial_state=None if z_init is None else z_init.squeeze(1).unsqueeze(-1),
        output_final_state=True,
        reverse=reverse,
        cu_seqlens=cu_seqlens,
    )
    assert z is not None
    return (o.to(dtype) / (denominator + EPS)).to(o.dtype), z.squeeze(-1).unsqueeze(1)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    initial_state: State | None,
    output_final_state: bool,
    normalize: bool,
    cu_seqlens: Tensor | None,
    reverse: bool = False,
) -> tuple[Tensor, Any]:
    """The PyTorch path of the three ops."""
    if not normalize:
        assert initial_state is None or isinstance(initial_state, Tensor)
        return linear_attention(
            q,
            k,
            v,
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            reverse=reverse,
            cu_seqlens=cu_seqlens,
        )
    # One more value channel of ones carries the denominator and its state along, all in float32.
    dtype = compute_dtype(q.dtype)
    kv, z = initial_state if isinstance(initial_state, (tuple, list)) else (initial_state, None)
    o, final = linear_attention(
        q.to(dtype),
        k.to(dtype),
        torch.cat([v.to(dtype), v.new_ones((*v.shape[:3], 1), dtype=dtype)], -1),
        scale=scale,
        initial_state=_join(kv, z, v.shape[-1], dtype),
        output_final_state=True,
        reverse=reverse,
        cu_seqlens=cu_seqlens,
    )
    assert final is not None
    o = (o[..., :-1] / (o[..., -1:] + EPS)).to(q.dtype)
    state = final[..., :-1].contiguous() if output_final_state else None
    return o, (state, final[..., -1].unsqueeze(1))


def _join(kv: Tensor | None, z: Tensor | None, V: int, dtype: torch.dtype) -> Tensor | None:
    """``[N, H, K, V]`` and ``[N, 1, H, K]`` to ``[N, H, K, V + 1]``; None counts as zero."""
    if kv is None and z is None:
        return None
    column = None if z is None else z.to(dtype).squeeze(1).unsqueeze(-1)
    if kv is None:
        assert column is not None
        return torch.cat([column.new_zeros(*column.shape[:-1], V), column], -1)
    kv = kv.to(dtype)
    return torch.cat([kv, kv.new_zeros(*kv.shape[:-1], 1) if column is None else column], -1)


def outputs(values: Mapping[str, Any]) -> tuple[Tensor, Any]:
    """Empty results of a call."""
    o, state = state_outputs(values)
    if not values.get("normalize"):
        return o, state
    q, cu_seqlens = values["q"], values.get("cu_seqlens")
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return o, (state, q.new_empty((N, 1, *q.shape[2:]), dtype=compute_dtype(q.dtype)))
