"""Retention in the quadratic form: for short sequences one product of all pairs beats going by chunks.

With ``a_h = 1 - 2 ** (-5 - h)``, ``D_h[i, j] = a_h ** (i - j)`` for ``i >= j`` and 0 above::

    o = scale * ((q k^T) * D) v + scale * a^(i + 1) q S_0
    S = (a^(T - 1 - j) k)^T v + a^T S_0
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """What is computed in: float32, float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@functools.lru_cache(maxsize=16)
def decays(T: int, H: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``D [H, T, T]``, ``a^(i + 1) [H, T, 1]``, ``a^(T - 1 - j) [H, T, 1]`` and ``a^T [H, 1, 1]``."""
    with torch.inference_mode(False), torch.no_grad():
        # In float64: near the end of a long product the rounding of a itself would show.
        log_a = torch.log1p(-torch.exp2(-5.0 - torch.arange(H, dtype=torch.float64, device=device))).view(H, 1, 1)
        i = torch.arange(T, dtype=torch.float64, device=device)
        pairs = ((i[:, None] - i[None, :]) * log_a).exp().tril()
        first, last = ((i[:, None] + 1) * log_a).exp(), ((T - 1 - i[:, None]) * log_a).exp()
        return pairs.to(dtype), first.to(dtype), last.to(dtype), (T * log_a).exp().to(dtype)


def heads_first(*tensors: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """``[B, T, H, D]`` as ``[B, H, T, D]`` in `dtype`."""
    return [x.to(dtype).transpose(1, 2) for x in tensors]


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs ``[B, T, H, V]`` in the dtype of q and the final state ``[B, H, K, V]``."""
    dtype = wide(q.dtype)
    pairs, first, last, whole = decays(q.shape[1], q.shape[2], dtype, q.device)
    q_, k_, v_ = heads_first(q, k, v, dtype=dtype)
    o = ((q_ @ k_.mT) * pairs) @ v_
    state = (k_ * last).mT @ v_
    if initial_state is not None:
        S = initial_state.to(dtype)
        o = o + (q_ * first) @ S
        state = state + whole * S
    return (o * scale).transpose(1, 2).to(q.dtype).contiguous(), state


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    initial_state: Tensor | None,
    do: Tensor | None,
    dstate: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and the initial state from those of the outputs and the final state."""
    dtype = wide(q.dtype)
    pairs, first, last, whole = decays(q.shape[1], q.shape[2], dtype, q.device)
    q_, k_, v_ = heads_first(q, k, v, dtype=dtype)
    dq, dk, dv = torch.zeros_like(q_), torch.zeros_like(k_), torch.zeros_like(v_)
    dS = None if initial_state is None else torch.zeros_like(initial_state, dtype=dtype)
    if do is not None:
        (do_,) = heads_first(do, dtype=dtype)
        do_ = do_ * scale
        weights, dscores = (q_ @ k_.mT) * pairs, (do_ @ v_.mT) * pairs
        dq, dk, dv = dscores @ k_, dscores.mT @ q_, weights.mT @ do_
        if initial_state is not None:
            dq = dq + first * (do_ @ initial_state.to(dtype).mT)
            dS = (q_ * first).mT @ do_
    if dstate is not None:
        d = dstate.to(dtype)
        dk = dk + last * (v_ @ d.mT)
        dv = dv + (k_ * last) @ d
        if dS is not None:
            dS = dS + whole * d
    dq, dk, dv = (g.transpose(1, 2).to(x.dtype).contiguous() for g, x in ((dq, q), (dk, k), (dv, v)))
    return dq, dk, dv, None if initial_state is None or dS is None else dS.to(initial_state.dtype)


class Retention(torch.autograd.Function):
    """The same for autograd."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, initial_state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v, initial_state)
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        return forward(q, k, v, scale, initial_state)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, initial_state = ctx.saved_tensors
        dq, dk, dv, dS = backward(q, k, v, ctx.scale, initial_state, do, dstate)
        return dq, dk, dv, None, dS


def default_scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def chunk_retention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, initial_state: Tensor | None, output_final_state: bool
) -> tuple[Tensor, Tensor | None]:
    o, state = Retention.apply(q, k, v, default_scale(q, scale), initial_state)
    return o, state if output_final_state else None


def compiled_backward(args: Sequence[Any], grads: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Any]:
    """Gradients of the tensor arguments of a compiled call, in order, from one gradient per tensor result."""
    q, k, v, scale, initial_state, output_final_state = args[:6]
    do, dstate = grads[0], grads[1] if output_final_state else None
    found = backward(q, k, v, default_scale(q, scale), initial_state, do, dstate)
    tensors = found if initial_state is not None else found[:3]
    return [g if wanted else None for g, wanted in zip(tensors, needed, strict=True)]
