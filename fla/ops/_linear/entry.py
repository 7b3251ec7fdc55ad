# SPDX-License-Identifier: MIT
"""Triton paths of the public ops with a scalar decay or none.

Every function has the parameters of the public op it serves; arguments have been checked there. `covers` says which
calls come here; the others run in PyTorch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fla.ops._linear.autograd import scalar_linear
from fla.ops._linear.normalizer import normalized_linear
from fla.ops._linear.rows import lightning_decay, retention_decay

Result = tuple[Tensor, Tensor | None]
State = Tensor | tuple[Tensor | None, Tensor | None]


@functools.lru_cache(maxsize=256)
def _kept(decay: Callable[..., Tensor], heads: int, device: torch.device, *layer: int) -> Tensor:
    # A copy from the host waits for its end, so that any stream may use the result.
    with torch.inference_mode(False):
        return decay(torch.empty(1, 1, heads, 1, dtype=torch.float64), *layer).float().to(device)


def _fixed(decay: Callable[..., Tensor], q: Tensor, *layer: int) -> Tensor:
    """The fixed log decays `[H]` of an op, made once: computing them takes more launches than the op itself."""
    if q.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return decay(q, *layer)
    return _kept(decay, q.shape[2], q.device, *layer)


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


def parallel_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, scale: float | None = None,
    output_attentions: bool = False, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
) -> Result:  # fmt: skip
    """Without the scores: `covers_parallel` leaves ``output_attentions`` to PyTorch."""
    return chunk_simple_gla(q, k, v, g, None, scale, cu_seqlens=cu_seqlens)


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
    gamma = _fixed(retention_decay, q)
    return chunk_simple_gla(q, k, v, None, gamma, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_chunk_retention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    return chunk_retention(q, k, v, scale, initial_state, output_final_state, cu_seqlens)


def parallel_retention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    return chunk_retention(q, k, v, scale, cu_seqlens=cu_seqlens)


def fused_recurrent_retention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, reverse: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    gamma = _fixed(retention_decay, q)
    return fused_recurrent_simple_gla(
        q, k, v, None, gamma, scale, initial_state, output_final_state, reverse, state_v_first, cu_seqlens
    )  # fmt: skip


def chunk_lightning_attn(
    q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None, *,
    chunk_size: int | None = None,
) -> Result:  # fmt: skip
    gamma = _fixed(lightning_decay, q, layer_idx, num_layers)
    return chunk_simple_gla(q, k, v, None, gamma, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def chunk_linear_attn(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: State | None = None,
    output_final_state: bool = False, normalize: bool = True, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Any]:  # fmt: skip
    return _linear_attn(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens)


def fused_recurrent_lightning_attn(
    q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    gamma = _fixed(lightning_decay, q, layer_idx, num_layers)
    return fused_recurrent_simple_gla(
        q, k, v, None, gamma, scale, initial_state, output_final_state, reverse, False, cu_seqlens
    )  # fmt: skip


def fused_recurrent_linear_attn(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: State | None = None,
    output_final_state: bool = False, reverse: bool = False, normalize: bool = False, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Any]:  # fmt: skip
    return _linear_attn(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens, reverse, True)


def _linear_attn(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, initial_state: State | None, final: bool, normalize: bool,
    cu_seqlens: Tensor | None, reverse: bool = False, tokens: bool = False,
) -> tuple[Tensor, Any]:  # fmt: skip
    state, z = initial_state if isinstance(initial_state, (tuple, list)) else (initial_state, None)
    if not normalize:
        return scalar_linear(
            q, k, v, scale=scale, initial_state=state, output_final_state=final, reverse=reverse,
            cu_seqlens=cu_seqlens, tokens=tokens,
        )  # fmt: skip
    o, ht, zt = normalized_linear(
        q, k, v, scale=scale, state=state, z=z, final=final, reverse=reverse, cu_seqlens=cu_seqlens, tokens=tokens
    )
    return o, (ht, zt)


# The same parameters, the same results.
fused_chunk_linear_attn = chunk_linear_attn
