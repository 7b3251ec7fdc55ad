# SPDX-License-Identifier: MIT
"""HGRN written down."""

from __future__ import annotations

import torch
from torch import Tensor

from fla.ops._common.gates import compute_dtype

__all__ = ["naive_chunk_hgrn", "naive_recurrent_hgrn"]


def naive_recurrent_hgrn(
    x: Tensor, g: Tensor, initial_state: Tensor | None = None, output_final_state: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Token by token, the ground truth of ``chunk_hgrn``.

    Args:
        x: ``[B, T, D]``.
        g: log decay (natural) ``[B, T, D]``.
        initial_state: ``[B, D]``.
        output_final_state: return the final state.

    Returns:
        ``o [B, T, D]`` in the dtype of x, and the final state ``[B, D]`` (float32; float64 for float64) or None.
    """
    dtype = compute_dtype(x.dtype)
    h = x.new_zeros(x.shape[0], x.shape[2], dtype=dtype) if initial_state is None else initial_state.to(dtype)
    outputs = []
    for t in range(x.shape[1]):
        h = g[:, t].to(dtype).exp() * h + x[:, t].to(dtype)
        outputs.append(h)
    o = torch.stack(outputs, 1).to(x.dtype) if outputs else x
    return o, h if output_final_state else None


def naive_chunk_hgrn(
    x: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """In chunks, with the decay of every pair of tokens spelt out, for any ``T``; as ``naive_recurrent_hgrn``."""
    dtype = compute_dtype(x.dtype)
    h = x.new_zeros(x.shape[0], x.shape[2], dtype=dtype) if initial_state is None else initial_state.to(dtype)
    outputs = []
    for xc, gc in zip(x.to(dtype).split(chunk_size, 1), g.to(dtype).split(chunk_size, 1), strict=True):
        C = xc.shape[1]
        if C == 0:
            continue
        below = torch.ones(C, C, dtype=torch.bool, device=x.device).tril(-1).unsqueeze(-1)
        # Decay from token j to token i: the sum of the gates after j, counted only below the diagonal.
        pairs = gc.unsqueeze(2).expand(-1, C, C, -1).masked_fill(~below, 0).cumsum(1).exp()
        inside = (pairs * xc.unsqueeze(1)).masked_fill(below.transpose(0, 1), 0).sum(2)
        outputs.append(gc.cumsum(1).exp() * h.unsqueeze(1) + inside)
        h = outputs[-1][:, -1]
    o = torch.cat(outputs, 1).to(x.dtype) if outputs else x
    return o, h if output_final_state else None
