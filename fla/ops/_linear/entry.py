# SPDX-License-Identifier: MIT
"""Triton paths of the public ops with a scalar decay or none.

Every function has the parameters of the public op it serves; arguments have been checked there. `covers` says which
calls may come here. No op names these paths yet: the kernels have not run on a device (docs/engines/linear_scalar.md).
"""

from __future__ import annotations

from torch import Tensor

from fla.ops._linear.autograd import scalar_linear
from fla.ops._linear.rows import lightning_decay, retention_decay

Result = tuple[Tensor, Tensor | None]


def chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, *,
    chunk_size: int | None = None,
) -> Result:  # fmt: skip
    return scalar_linear(
        q, k, v, g=g, g_gamma=g_gamma, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        state_v_first=state_v_first, cu_seqlens=cu_seqlens,
    )  # fmt: skip


def fused_chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    return chunk_simple_gla(q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_recurrent_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    reverse: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    return scalar_linear(
        q, k, v, g=g, g_gamma=g_gamma, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        reverse=reverse, state_v_first=state_v_first, cu_seqlens=cu_seqlens, tokens=True,
    )  # fmt: skip


def chunk_retention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, *, chunk_size: int | None = None,
) -> Result:  # fmt: skip
    gamma = retention_decay(q)
    return chunk_simple_gla(q, k, v, None, gamma, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_recurrent_retention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, reverse: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    gamma = retention_decay(q)
    return fused_recurrent_simple_gla(
        q, k, v, None, gamma, scale, initial_state, output_final_state, reverse, state_v_first, cu_seqlens
    )  # fmt: skip


def chunk_lightning_attn(
    q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None, *,
    chunk_size: int | None = None,
) -> Result:  # fmt: skip
    gamma = lightning_decay(q, layer_idx, num_layers)
    return chunk_simple_gla(q, k, v, None, gamma, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def chunk_linear_attn(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, normalize: bool = True, cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """Without the normaliser: `covers_linear_attn` leaves ``normalize`` to PyTorch."""
    return chunk_simple_gla(q, k, v, None, None, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_recurrent_lightning_attn(
    q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    gamma = lightning_decay(q, layer_idx, num_layers)
    return fused_recurrent_simple_gla(
        q, k, v, None, gamma, scale, initial_state, output_final_state, reverse, False, cu_seqlens
    )  # fmt: skip


def fused_recurrent_linear_attn(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, reverse: bool = False, normalize: bool = False, cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    """Without the normaliser, as `chunk_linear_attn`."""
    return fused_recurrent_simple_gla(
        q, k, v, None, None, scale, initial_state, output_final_state, reverse, False, cu_seqlens
    )  # fmt: skip


# The same parameters, the same results.
fused_chunk_linear_attn = chunk_linear_attn
