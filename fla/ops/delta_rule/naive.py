# SPDX-License-Identifier: MIT
"""The delta rule written down three ways. Layout ``[B, H, T, D]``, scale ``K ** -0.5``, keys as they come."""

from __future__ import annotations

import torch
from torch import Tensor

from fla.ops._common.checks import ArgumentError
from fla.ops._common.gates import compute_dtype


def _prepare(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = compute_dtype(v.dtype)
    beta = beta if beta.dim() == v.dim() else beta.unsqueeze(-1)
    return q.to(dtype) * q.shape[-1] ** -0.5, k.to(dtype), v.to(dtype), beta.to(dtype)


def delta_rule_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Token by token, the ground truth.

    Args:
        q: ``[B, H, T, K]``.
        k: ``[B, H, T, K]``.
        v: ``[B, H, T, V]``.
        beta: ``[B, H, T]`` or ``[B, H, T, V]``.
        initial_state: ``[B, H, K, V]``.
        output_final_state: return the final state.

    Returns:
        ``o [B, H, T, V]`` in the dtype of q and the final state ``[B, H, K, V]`` (float32, float64 for float64 inputs).
    """
    query, k, v, beta = _prepare(q, k, v, beta)
    S = v.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    if initial_state is not None:
        S = S + initial_state.to(S.dtype)
    outputs = []
    for t in range(q.shape[2]):
        update = beta[:, :, t] * (v[:, :, t] - torch.einsum("bhk,bhkv->bhv", k[:, :, t], S))
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, :, t], update)
        outputs.append(torch.einsum("bhk,bhkv->bhv", query[:, :, t], S))
    o = torch.stack(outputs, 2) if outputs else torch.zeros_like(v)
    return o.to(q.dtype), S if output_final_state else None


def delta_rule_chunkwise(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, chunk_size: int = 32) -> tuple[Tensor, Tensor]:
    """Chunk by chunk (WY form); ``beta [B, H, T]``, otherwise as ``delta_rule_recurrence``.

    Raises:
        ArgumentError: (AssertionError and ValueError) ``T`` is not a multiple of ``chunk_size``.
    """
    T = q.shape[2]
    if T % chunk_size:
        raise ArgumentError(f"T must be a multiple of chunk_size = {chunk_size}, got T = {T}.")
    query, k, v, beta = _prepare(q, k, v, beta)
    S = v.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    outputs = []
    for start in range(0, T, chunk_size):
        qc, kc, vc, bc = (x[:, :, start : start + chunk_size] for x in (query, k, v, beta))
        written = _inverse(kc, bc) @ (bc * (vc - kc @ S))
        outputs.append(qc @ S + (qc @ kc.mT).tril() @ written)
        S = S + kc.mT @ written
    return torch.cat(outputs, 2).to(q.dtype) if outputs else torch.zeros_like(v).to(q.dtype), S


def delta_rule_parallel(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, BM: int = 128, BN: int = 32
) -> tuple[Tensor, Tensor]:
    """All tokens at once; ``beta [B, H, T]``, otherwise as ``delta_rule_recurrence``. ``BM`` and ``BN`` are accepted.

    Returns:
        ``o [B, H, T, V]`` in the dtype of q and the effective attention ``[B, H, T, T]``, with ``o = attention @ v``.
    """
    query, k, value, beta = _prepare(q, k, v, beta)
    attention = attention_matrix(query, k, beta)
    return (attention @ value).to(q.dtype), attention


def attention_matrix(q: Tensor, k: Tensor, beta: Tensor) -> Tensor:
    """The matrix by which the delta rule maps values to outputs; ``q`` scaled, ``beta [B, H, T, 1]``."""
    return (q @ k.mT).tril() @ _inverse(k, beta) * beta.mT


def _inverse(k: Tensor, beta: Tensor) -> Tensor:
    eye = torch.eye(k.shape[2], dtype=k.dtype, device=k.device)
    return torch.linalg.solve_triangular(
        (beta * k @ k.mT).tril(-1), eye.expand(*k.shape[:2], -1, -1), upper=False, unitriangular=True
    )
