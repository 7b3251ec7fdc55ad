# SPDX-License-Identifier: MIT
"""RWKV-6 written plainly: the reference of the tests. Heads come before time here, unlike in the ops."""

from __future__ import annotations

import torch
from torch import Tensor

from fla.ops._common.gates import compute_dtype

__all__ = ["naive_recurrent_rwkv6", "naive_recurrent_rwkv6_bwd"]


def naive_recurrent_rwkv6(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Token by token, the ground truth of ``chunk_rwkv6``.

    Args:
        q, k: ``[B, H, T, K]``.
        v: ``[B, H, T, V]``.
        w: natural log decay ``[B, H, T, K]``.
        u: ``[H, K]``.
        scale: factor of the outputs; ``K ** -0.5`` if None.
        initial_state: ``[B, H, K, V]``.
        output_final_state: whether to return the state.

    Returns:
        ``o`` ``[B, H, T, V]`` in the dtype of q, and the state (float32; float64 for float64) or None.
    """
    wide = compute_dtype(q.dtype)
    B, H, T, K = q.shape
    scale = K**-0.5 if scale is None else scale
    r, keys, values, decay, weight = (x.to(wide) for x in (q, k, v, w, u))
    S = r.new_zeros(B, H, K, v.shape[-1]) if initial_state is None else initial_state.to(wide)
    rows = []
    for t in range(T):
        added = keys[:, :, t].unsqueeze(-1) * values[:, :, t].unsqueeze(-2)
        rows.append(scale * torch.einsum("bhk,bhkv->bhv", r[:, :, t], S + weight.unsqueeze(-1) * added))
        S = decay[:, :, t].exp().unsqueeze(-1) * S + added
    o = torch.stack(rows, 2) if rows else torch.zeros_like(values)
    return o.to(q.dtype), S if output_final_state else None


def naive_recurrent_rwkv6_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    o: Tensor,
    do: Tensor,
    initial_state: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients ``(dq, dk, dv, dw, du, dh0)`` of ``naive_recurrent_rwkv6`` with ``scale = 1`` from ``do``, that of its
    outputs; ``o`` is not used."""
    given = [x.detach().requires_grad_() for x in (q, k, v, w, u)]
    state = None if initial_state is None else initial_state.detach().requires_grad_()
    with torch.enable_grad():
        q, k, v, w, u = given
        result, _ = naive_recurrent_rwkv6(q, k, v, w, u, scale=1.0, initial_state=state)
    leaves = given if state is None else [*given, state]
    grads = torch.autograd.grad(result, leaves, do, allow_unused=True, materialize_grads=True)
    return grads if state is not None else (*grads, None)
