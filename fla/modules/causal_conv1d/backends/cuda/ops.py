# SPDX-License-Identifier: MIT
"""Short forms of ``causal_conv1d(..., backend="cuda")``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fla.modules.causal_conv1d.ops import causal_conv1d

__all__ = ["causal_conv1d_cuda", "fast_causal_conv1d_fn"]


def fast_causal_conv1d_fn(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """:func:`fla.modules.causal_conv1d.causal_conv1d` with ``backend="cuda"``; arguments as there."""
    return causal_conv1d(
        x,
        weight,
        bias,
        residual,
        initial_state,
        output_final_state,
        activation,
        "cuda",
        cu_seqlens,
        cu_seqlens_cpu,
        seq_idx=seq_idx,
    )


def causal_conv1d_cuda(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """:func:`fast_causal_conv1d_fn`; ``kwargs`` may hold ``seq_idx``, others are ignored."""
    return fast_causal_conv1d_fn(
        x,
        weight,
        bias,
        residual,
        initial_state,
        output_final_state,
        activation,
        cu_seqlens,
        cu_seqlens_cpu,
        seq_idx=kwargs.get("seq_idx"),
    )
