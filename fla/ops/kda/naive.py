# SPDX-License-Identifier: MIT
"""Kimi Delta Attention written down: the recurrence, and the chunk form with every pair spelt out. Slow and plain."""

from __future__ import annotations

import torch
from torch import Tensor

from fla.ops._common.checks import ArgumentError
from fla.ops._common.gates import compute_dtype


def naive_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Token by token: decay, read, write, read out; the ground truth of ``chunk_kda``.

    Args:
        q: ``[B, T, H, K]``.
        k: ``[B, T, H, K]``.
        v: ``[B, T, HV, V]``.
        g: log decay (natural) ``[B, T, HV, K]``.
        beta: ``[B, T, HV]``.
        scale: factor of the outputs; ``K ** -0.5`` if None.
        initial_state: ``[B, HV, K, V]`` or anything that broadcasts to it.
        output_final_state: return the final state.

    Returns:
        ``o [B, T, HV, V]`` in the dtype of v and the final state ``[B, HV, K, V]`` (float32, float64 for float64
        inputs).
    """
    dtype = compute_dtype(v.dtype)
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    q, k, value, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    q, k = (x.repeat_interleave(HV // H, 2) for x in (q * scale, k))
    S = q.new_zeros(B, HV, K, V)
    if initial_state is not None:
        S = S + initial_state.to(dtype)
    outputs = []
    for t in range(T):
        S = S * g[:, t].exp().unsqueeze(-1)
        error = value[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S)
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t].unsqueeze(-1) * error)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    o = torch.stack(outputs, 1) if outputs else torch.zeros_like(value)
    return o.to(v.dtype), S if output_final_state else None


def naive_chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """The chunk (WY) form with an explicit decay for every pair of tokens; arguments as ``naive_recurrent_kda``.

    Raises:
        ArgumentError: (AssertionError and ValueError) ``T`` is not a multiple of ``chunk_size``.
    """
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    if T % chunk_size:
        raise ArgumentError(f"T must be a multiple of chunk_size = {chunk_size}, got T = {T}.")
    dtype = compute_dtype(v.dtype)
    scale = K**-0.5 if scale is None else scale
    q, k, value, g, beta = (x.to(dtype).transpose(1, 2) for x in (q, k, v, g, beta))
    q, k = (x.repeat_interleave(HV // H, 1) for x in (q * scale, k))
    S = q.new_zeros(B, HV, K, V)
    if initial_state is not None:
        S = S + initial_state.to(dtype)
    below = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=q.device).tril(-1)
    eye = torch.eye(chunk_size, dtype=dtype, device=q.device)
    outputs = []
    for start in range(0, T, chunk_size):
        qc, kc, vc, gc, bc = (x[:, :, start : start + chunk_size] for x in (q, k, value, g, beta))
        # Decay from token j to token i: the sum of the gates after j, counted only below the diagonal.
        pairs = (
            gc.unsqueeze(3).expand(*gc.shape[:3], chunk_size, K).masked_fill(~below.unsqueeze(-1), 0).cumsum(2).exp()
        )
        A = torch.einsum("bhic,bhjc,bhijc->bhij", qc, kc, pairs).tril()
        L = torch.einsum("bhic,bhjc,bhijc->bhij", kc, kc, pairs).tril(-1) * bc.unsqueeze(-1)
        inverse = torch.linalg.inv(eye + L)
        head, tail = gc.cumsum(2).exp(), (gc.flip(2).cumsum(2).flip(2) - gc).exp()
        written = inverse @ (bc.unsqueeze(-1) * (vc - (kc * head) @ S))
        outputs.append((qc * head) @ S + A @ written)
        S = S * head[:, :, -1].unsqueeze(-1) + (kc * tail).mT @ written
    o = torch.cat(outputs, 2).transpose(1, 2) if outputs else torch.zeros_like(value.transpose(1, 2))
    return o.to(v.dtype), S if output_final_state else None
