# SPDX-License-Identifier: MIT
"""The recurrence of the family written down, for references: token by token, and in chunks with every pair spelt out.

Keys and values come as the recurrence uses them: ``read`` holds the erase coefficient, ``value`` the gain.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fla.ops._common.gates import compute_dtype

# Query, read key, write key, value and decay, as the functions take them.
Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _prepare(
    q: Tensor, read: Tensor, write: Tensor, value: Tensor, decay: Tensor, scale: float | None, state: Tensor | None
) -> tuple[list[Tensor], Tensor]:
    """All tensors as ``[B, HV, T, *]`` in the dtype of computation, the scaled queries first, and the first state."""
    dtype = compute_dtype(value.dtype)
    HV = value.shape[2]
    q = q.to(dtype) * (q.shape[-1] ** -0.5 if scale is None else scale)
    wide = [x.to(dtype).repeat_interleave(HV // x.shape[2], 2).transpose(1, 2) for x in (q, read, write, value, decay)]
    S = wide[0].new_zeros(q.shape[0], HV, q.shape[-1], value.shape[-1])
    return wide, S if state is None else S + state.to(dtype)


def _earlier(factors: Tensor) -> Tensor:
    """For each token the factor of the token before it; 1 for the first."""
    return torch.cat([torch.ones_like(factors[:, :, :1]), factors[:, :, :-1]], 2)


def _scores(rows: Tensor, columns: Tensor, pairs: Tensor) -> Tensor:
    return (rows.unsqueeze(3) * columns.unsqueeze(2) * pairs).sum(-1)


def recurrence(
    q: Tensor,
    read: Tensor,
    write: Tensor,
    value: Tensor,
    decay: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    exclusive: bool = False,
) -> tuple[Tensor, Tensor]:
    """Token by token.

    Args:
        q: ``[B, T, H, K]``.
        read: ``[B, T, H or HV, K]``.
        write: ``[B, T, H or HV, K]``.
        value: ``[B, T, HV, V]``.
        decay: log decay (natural) ``[B, T, HV, K]`` or ``[B, T, HV, 1]``.
        scale: factor of the outputs; ``K ** -0.5`` if None.
        initial_state: ``[B, HV, K, V]`` or anything that broadcasts to it.
        exclusive: the rule reads the state before its decay.

    Returns:
        ``o [B, T, HV, V]`` and the final state ``[B, HV, K, V]``, float32 (float64 for float64 values).
    """
    (q, read, write, value, decay), S = _prepare(q, read, write, value, decay, scale, initial_state)
    outputs = []
    for t in range(q.shape[2]):
        decayed = decay[:, :, t].exp().unsqueeze(-1) * S
        error = value[:, :, t] - torch.einsum("bhk,bhkv->bhv", read[:, :, t], S if exclusive else decayed)
        S = decayed + torch.einsum("bhk,bhv->bhkv", write[:, :, t], error)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, :, t], S))
    return torch.stack(outputs, 1) if outputs else value.transpose(1, 2), S


def chunks(
    q: Tensor,
    read: Tensor,
    write: Tensor,
    value: Tensor,
    decay: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    exclusive: bool = False,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """The chunk (WY) form with an explicit decay for every pair of tokens; arguments and results as ``recurrence``."""
    wide, S = _prepare(q, read, write, value, decay, scale, initial_state)
    outputs = []
    for qc, rc, wc, zc, gc in zip(*(x.split(chunk_size, 2) for x in wide), strict=True) if q.shape[1] else ():
        C = qc.shape[2]
        below = torch.ones(C, C, dtype=torch.bool, device=qc.device).tril(-1).unsqueeze(-1)
        # Decay from token j to token i: the sum of the gates after j, counted only below the diagonal.
        pairs = gc.unsqueeze(3).expand(*gc.shape[:3], C, gc.shape[-1]).masked_fill(~below, 0).cumsum(2).exp()
        head, tail = gc.cumsum(2).exp(), pairs[:, :, -1]
        read_pairs, read_head = (_earlier(pairs), _earlier(head)) if exclusive else (pairs, head)
        L = _scores(rc, wc, read_pairs).tril(-1)
        written = torch.linalg.inv(torch.eye(C, dtype=L.dtype, device=L.device) + L) @ (zc - (rc * read_head) @ S)
        outputs.append((qc * head) @ S + _scores(qc, wc, pairs).tril() @ written)
        S = head[:, :, -1].unsqueeze(-1) * S + (wc * tail).mT @ written
    return torch.cat(outputs, 2).transpose(1, 2) if outputs else wide[3].transpose(1, 2), S


__all__ = ["Parts", "chunks", "recurrence"]
