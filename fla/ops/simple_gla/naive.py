# SPDX-License-Identifier: MIT
"""Simple GLA written plainly: the reference of the tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["naive_chunk_simple_gla", "naive_parallel_simple_gla", "naive_recurrent_simple_gla"]


def _wide(*tensors: Tensor) -> list[Tensor]:
    """float32, or float64 when the first is."""
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    return [x.to(dtype) for x in tensors]


def naive_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """``S_t = exp(g_t) S_{t-1} + k_t (x) v_t``, ``o_t = scale q_t S_t``, token by token.

    Args:
        q, k: ``[B, T, H, K]``.
        v: ``[B, T, H, V]``.
        g: natural log decay ``[B, T, H]``, or None for no decay.
        scale: None for ``K ** -0.5``.
        initial_state: ``[B, H, K, V]``.
        output_final_state: whether to return the state.

    Returns:
        ``o`` ``[B, T, H, V]`` in the dtype of q, and the state (float32; float64 for float64) or None.
    """
    dtype = q.dtype
    q, k, v = _wide(q, k, v)
    B, T, H, K = q.shape
    scale = K**-0.5 if scale is None else scale
    S = q.new_zeros(B, H, K, v.shape[-1]) if initial_state is None else initial_state.to(q.dtype)
    o = []
    for t in range(T):
        if g is not None:
            S = S * g[:, t].to(q.dtype).exp()[..., None, None]
        S = S + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        o.append(scale * (q[:, t].unsqueeze(-2) @ S).squeeze(-2))
    out = torch.stack(o, 1) if o else torch.zeros_like(v)
    return out.to(dtype), S if output_final_state else None


def naive_chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
    scale: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The same by chunks, for finite decays.

    Shapes as in :func:`naive_recurrent_simple_gla`; ``o`` is float32 (float64 for float64).
    """
    q, k, v = _wide(q, k, v)
    B, T, H, K = q.shape
    scale = K**-0.5 if scale is None else scale
    gates = q.new_zeros(B, T, H) if g is None else g.to(q.dtype)
    S = q.new_zeros(B, H, K, v.shape[-1]) if initial_state is None else initial_state.to(q.dtype)
    padding = -T % chunk_size
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, padding)) for x in (q, k, v))
    gates = F.pad(gates, (0, 0, 0, padding))
    o = torch.zeros_like(v)
    for start in range(0, T, chunk_size):
        rows = slice(start, start + chunk_size)
        qc, kc, vc = (x[:, rows].transpose(1, 2) for x in (q, k, v))
        b = gates[:, rows].transpose(1, 2).cumsum(-1)
        between = (b.unsqueeze(-1) - b.unsqueeze(-2)).tril().exp().tril()
        inside = (qc @ kc.mT * between) @ vc
        o[:, rows] = (scale * (inside + (qc * b.exp().unsqueeze(-1)) @ S)).transpose(1, 2)
        last = b[..., -1:]
        S = S * last.exp().unsqueeze(-1) + (kc * (last - b).exp().unsqueeze(-1)).mT @ vc
    return o[:, :T], S if output_final_state else None


def naive_parallel_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """The same as attention, for finite decays.

    Shapes as above; returns ``o`` in the dtype of q and the scores ``[B, H, T, T]``.
    """
    dtype = q.dtype
    q, k, v = _wide(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    A = (q.transpose(1, 2) @ k.transpose(1, 2).mT * scale).tril()
    if g is not None:
        G = g.to(q.dtype).transpose(1, 2).cumsum(-1)
        A = A * (G.unsqueeze(-1) - G.unsqueeze(-2)).tril().exp()
    return (A @ v.transpose(1, 2)).transpose(1, 2).to(dtype), A.to(dtype)
