# SPDX-License-Identifier: MIT
"""RWKV-6 in chunks, with the decay of every pair of tokens spelt out. Heads come before time."""

from __future__ import annotations

import torch
from torch import Tensor

from fla.ops._common.checks import ArgumentError
from fla.ops._common.gates import compute_dtype

__all__ = ["naive_chunk_rwkv6"]


def naive_chunk_rwkv6(q: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, chunk_size: int = 32) -> Tensor:
    """Outputs ``[B, H, T, V]`` of ``naive_recurrent_rwkv6`` with ``scale = 1``, from a state of zeros.

    Args:
        q, k: ``[B, H, T, K]``.
        v: ``[B, H, T, V]``.
        w: natural log decay ``[B, H, T, K]``.
        u: ``[H, K]``.
        chunk_size: tokens per chunk; ``T`` must be a multiple of it.

    Raises:
        ArgumentError: (AssertionError and ValueError) ``T`` is not a multiple of ``chunk_size``.
    """
    B, H, T, K = q.shape
    if T % chunk_size:
        raise ArgumentError(f"T must be a multiple of chunk_size = {chunk_size}, got T = {T}.")
    wide = compute_dtype(q.dtype)
    below = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=q.device).tril(-1)
    S = q.new_zeros(B, H, K, v.shape[-1], dtype=wide)
    outputs = []
    for parts in zip(*(x.to(wide).split(chunk_size, 2) for x in (q, k, v, w)), strict=True) if T else ():
        r, keys, values, decay = parts
        # Decay from token j to the state before token i: the gates after j and before i.
        pairs = decay.unsqueeze(3).expand(*decay.shape[:3], chunk_size, K).masked_fill(~below.unsqueeze(-1), 0)
        pairs, head = pairs.cumsum(2).exp(), decay.cumsum(2).exp()
        tail = pairs[:, :, -1]
        before = lambda x: torch.cat([torch.ones_like(x[:, :, :1]), x[:, :, :-1]], 2)
        A = torch.einsum("bhik,bhjk,bhijk->bhij", r, keys, before(pairs)).masked_fill(~below, 0)
        A = A + torch.diag_embed((r * u.to(wide).unsqueeze(1) * keys).sum(-1))
        outputs.append((r * before(head)) @ S + A @ values)
        S = head[:, :, -1].unsqueeze(-1) * S + (keys * tail).mT @ values
    return torch.cat(outputs, 2).to(q.dtype) if outputs else torch.zeros_like(v)
