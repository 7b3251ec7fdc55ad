# SPDX-License-Identifier: MIT
"""Autograd of linear attention with a decay per channel on the Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fla.backends import needs_backward
from fla.ops._common.launch import aligned, on_device
from fla.ops._linear.vector import Work

# The chunk gradient can take the softmax of up to so many channels along.
SOFTMAX_AT_MOST = 128


def key_decay(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, u: Tensor | None, h0: Tensor | None, scale: float, v_first: bool,
    final: bool, cu_seqlens: Tensor | None, make: dict[str, Any],
) -> tuple[Tensor, Tensor | None, Tensor | None, Work]:  # fmt: skip
    """Output, final state, entries of the stretches and what was launched."""
    work = Work(q, k, v, g, u, scale, v_first, cu_seqlens, **make)
    work.prep()
    ht = work.state() if final else None
    o, _, entry = work.scan(v, h0, final=ht)
    assert o is not None
    return o, ht, entry, work


def value_decay(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, h0: Tensor | None, scale: float, v_first: bool, final: bool,
    softmax: bool, cu_seqlens: Tensor | None, make: dict[str, Any],
) -> tuple[Tensor, Tensor | None, Tensor | None, Work]:  # fmt: skip
    """As `key_decay`; the reason why this is right stands at `ValueDecay`."""
    work = Work(None, v, k, g, None, scale, not v_first, cu_seqlens, **make)
    work.prep()
    ht = work.state() if final else None
    _, states, entry = work.scan(k, h0, final=ht, out=False, save=True)
    assert states is not None
    soft = softmax and work.plan.kp <= SOFTMAX_AT_MOST
    o, _, _, _ = work.grad(q, states, None, torch.float32 if softmax and not soft else None, soft)
    if softmax and not soft:
        o = o.softmax(-1).to(q.dtype)
    return o, ht, entry, work


class KeyDecay(torch.autograd.Function):
    """``(o, final state or None)`` with a decay per key channel; see `vector_linear`."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, u: Tensor | None, h0: Tensor | None, scale: float,
        v_first: bool, final: bool, cu_seqlens: Tensor | None, make: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        o, ht, entry, work = key_decay(q, k, v, g, u, h0, scale, v_first, final, cu_seqlens, make)
        ctx.save_for_backward(q, k, v, g, u, h0, work.tiles, work.mats, work.decay, entry)
        ctx.scale, ctx.v_first, ctx.kw = scale, v_first, _same(work)
        ctx.set_materialize_grads(False)
        return o, ht

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor | None, dht: Tensor | None = None) -> tuple[Any, ...]:
        q, k, v, g, u, h0, tiles, mats, decay, entry = ctx.saved_tensors
        if do is None and dht is None:
            return (None,) * 11
        do = torch.zeros_like(v) if do is None else aligned(do)
        dht = None if dht is None else dht.contiguous()
        with on_device(q):
            work = Work(q, k, v, g, u, ctx.scale, ctx.v_first, None, **ctx.kw)
            work.tiles, work.mats, work.decay = tiles, mats, decay
            dh0 = torch.empty_like(h0) if ctx.needs_input_grad[5] else None
            # The states are computed again: keeping them costs as much memory traffic as the pass itself.
            _, states, _ = work.scan(v, h0, out=False, save=True, entry=entry)
            dv, exits, _ = work.scan(do, dht, reverse=True, final=dh0, save=True)
            assert states is not None
            dq, dk, dg, du = work.grad(do, states, exits)
        return dq, dk, dv, dg, None if du is None or u is None else du.to(u.dtype), dh0, *(None,) * 5


class ValueDecay(torch.autograd.Function):
    """``(o, final state or None)`` with a decay per value channel; see `vector_linear`.

    ``sum_ij (q_i . k_j) (do_i . v_j e^(b_i - b_j))`` over j <= i is symmetric under swapping (q, k) with (do, v): this
    recurrence is the one with a decay per key channel in which v and g are the keys, k the values and q the gradient of
    the output. Its output is that one's dq, and its gradients are that one's output and gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, h0: Tensor | None, scale: float, v_first: bool,
        final: bool, softmax: bool, cu_seqlens: Tensor | None, make: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        o, ht, entry, work = value_decay(q, k, v, g, h0, scale, v_first, final, softmax, cu_seqlens, make)
        ctx.save_for_backward(q, k, v, g, h0, entry, o if softmax else None)
        ctx.scale, ctx.v_first, ctx.kw = scale, not v_first, _same(work)
        ctx.set_materialize_grads(False)
        return o, ht

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor | None, dht: Tensor | None = None) -> tuple[Any, ...]:
        q, k, v, g, h0, entry, p = ctx.saved_tensors
        if do is None and dht is None:
            return (None,) * 11
        if do is None:
            do = torch.zeros_like(v)
        elif p is not None:
            do = torch.ops.aten._softmax_backward_data(do, p, -1, v.dtype)
        do = aligned(do)
        dht = None if dht is None else dht.contiguous()
        with on_device(q):
            work = Work(do, v, k, g, None, ctx.scale, ctx.v_first, None, **ctx.kw)
            work.prep()
            dh0 = torch.empty_like(h0) if ctx.needs_input_grad[4] else None
            dq, states, _ = work.scan(k, h0, save=True, entry=entry)
            dk, exits, _ = work.scan(q, dht, reverse=True, final=dh0, save=True)
            assert states is not None
            _, dv, dg, _ = work.grad(q, states, exits)
        return dq, dk, dv, dg, dh0, *(None,) * 6


def _same(work: Work) -> dict[str, Any]:
    return {"table": work.table, "plan": work.plan, "segments": work.segments}


def _c(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def vector_linear(
    q: Tensor, k: Tensor, v: Tensor, *, gk: Tensor | None = None, gv: Tensor | None = None, bonus: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    reverse: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    softmax: bool = False, **make: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Linear attention with one decay per key channel (with or without a bonus) or per value channel; differentiable.

    q, k `[B, T, H, K]`, v `[B, T, H, V]` of one 16- or 32-bit dtype; gk `[B, T, H, K]` or gv `[B, T, H, V]`: natural
    log decays, any float; bonus `[H, K]`: read the state before the token and the token with this weight. ``softmax``:
    with gv, of the outputs over their channels. Arguments have been checked by the public functions.

    Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (2023), section 4.
    """
    if reverse:
        if cu_seqlens is not None:
            # The last sequence comes first now.
            cu_seqlens = k.shape[1] - cu_seqlens.flip(0)
            initial_state = None if initial_state is None else initial_state.flip(0)
        q, k, v = q.flip(1), k.flip(1), v.flip(1)
        gk, gv = (None if x is None else x.flip(1) for x in (gk, gv))
        o, ht = vector_linear(
            q, k, v, gk=gk, gv=gv, bonus=bonus, scale=scale, initial_state=initial_state,
            output_final_state=output_final_state, state_v_first=state_v_first, cu_seqlens=cu_seqlens, softmax=softmax,
            **make,
        )  # fmt: skip
        return o.flip(1), ht if ht is None or cu_seqlens is None else ht.flip(0)
    q, k, v = aligned(q), aligned(k), aligned(v)
    gk, gv, bonus, h0, cu_seqlens = (_c(x) for x in (gk, gv, bonus, initial_state, cu_seqlens))
    scale = k.shape[-1] ** -0.5 if scale is None else float(scale)
    train = needs_backward((q, k, v, gk, gv, bonus, h0))
    with on_device(q):
        if gv is None:
            assert gk is not None
            keys = (q, k, v, gk, bonus, h0, scale, state_v_first, output_final_state, cu_seqlens, make)
            return KeyDecay.apply(*keys) if train else key_decay(*keys)[:2]
        assert gk is None
        values = (q, k, v, gv, h0, scale, state_v_first, output_final_state, softmax, cu_seqlens, make)
        return ValueDecay.apply(*values) if train else value_decay(*values)[:2]
