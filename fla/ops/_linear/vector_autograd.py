# SPDX-License-Identifier: MIT
"""Autograd of linear attention with a decay per channel on the Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fla.backends import needs_backward
from fla.ops._common.first_call import first_call
from fla.ops._common.launch import aligned, on_device
from fla.ops._common.room import like
from fla.ops._common.served import differentiable, served
from fla.ops._common.tape import Body, Known, KnownCalls, look
from fla.ops._linear.vector import VectorCall, Work

# The chunk gradient can take the softmax of up to so many channels along.
SOFTMAX_AT_MOST = 128


def _keys(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, u: Tensor | None, h0: Tensor | None, cu: Tensor | None,
    call: VectorCall, final: bool, save: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """(o, final state) with a decay per key channel and, with ``save``, what the backward needs."""
    work = Work(call, q, k, v, g, u, cu)
    work.prep()
    ht = work.state() if final else None
    o, _, entry = work.scan(v, h0, final=ht)
    if not save:
        return o, ht
    return o, ht, work.room, entry, work.table.rows, work.table.offsets


def _keys_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, u: Tensor | None, h0: Tensor | None, cu: Tensor | None, room: Tensor,
    entry: Tensor | None, rows: Tensor | None, offsets: Tensor | None, do: Tensor,
    dht: Tensor | None, call: VectorCall, into_state: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    work = Work(call, q, k, v, g, u, cu, rows, offsets)
    work.carve(room)
    dh0 = like(h0) if into_state and h0 is not None else None
    # The states are computed again: keeping them costs as much memory traffic as the pass itself.
    _, states, _ = work.scan(v, h0, out=False, save=True, entry=entry)
    dv, exits, _ = work.scan(do, dht, reverse=True, final=dh0, save=True)
    assert states is not None
    dq, dk, dg, du = work.grad(do, states, exits)
    return dq, dk, dv, dg, None if du is None or u is None else du.to(u.dtype), dh0


def _values(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, h0: Tensor | None, cu: Tensor | None, call: VectorCall, final: bool,
    softmax: bool, save: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """As `_keys` with a decay per value channel.

    ``sum_ij (q_i . k_j) (do_i . v_j e^(b_i - b_j))`` over j <= i is symmetric under swapping (q, k) with (do, v): this
    recurrence is the one with a decay per key channel in which v and g are the keys, k the values and q the gradient of
    the output. Its output is that one's dq, and its gradients are that one's output and gradients.
    """
    work = Work(call, None, v, k, g, None, cu)
    work.prep()
    ht = work.state() if final else None
    _, states, entry = work.scan(k, h0, final=ht, out=False, save=True)
    assert states is not None
    soft = softmax and work.plan.kp <= SOFTMAX_AT_MOST
    o, _, _, _ = work.grad(q, states, None, torch.float32 if softmax and not soft else None, soft)
    if softmax and not soft:
        o = o.softmax(-1).to(q.dtype)
    return (o, ht, entry, work.table.rows, work.table.offsets) if save else (o, ht)


def _values_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, h0: Tensor | None, cu: Tensor | None, p: Tensor | None,
    entry: Tensor | None, rows: Tensor | None, offsets: Tensor | None, do: Tensor, dht: Tensor | None,
    call: VectorCall, into_state: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    if p is not None:
        do = torch.ops.aten._softmax_backward_data(do, p, -1, v.dtype)
    work = Work(call, do, v, k, g, None, cu, rows, offsets)
    work.prep()
    dh0 = like(h0) if into_state and h0 is not None else None
    dq, states, _ = work.scan(k, h0, save=True, entry=entry)
    dk, exits, _ = work.scan(q, dht, reverse=True, final=dh0, save=True)
    assert states is not None
    _, dv, dg, _ = work.grad(q, states, exits)
    return dq, dk, dv, dg, dh0


_calls = KnownCalls()


def _compile_ahead(
    forward: Body, backward: Body, call: VectorCall, inputs: tuple[Tensor | None, ...], final: bool, *more: bool
) -> None:
    """Have the kernels of a call compiled side by side."""
    train = needs_backward(inputs)
    h0 = inputs[-2]
    into_state = h0 is not None and h0.requires_grad

    def step(*x: Tensor | None) -> None:
        o, _, *saved = forward(*x, call, final, *more, train)
        if train:
            kept = (o if more[0] else None, *saved) if more else saved
            backward(*x, *kept, o, None, call, into_state)

    sizes = (call.plan, call.k[3], call.v[3], call.v_first, call.ragged, call.packed, call.segments > 1)
    first_call(set(), forward, lambda: (*sizes, train, into_state, final, more), inputs, step)


_train_keys = differentiable("KeyDecay", _keys, _keys_backward, 5)
_train_values = differentiable("ValueDecay", _values, _values_backward, 4, lambda call, final, softmax, save: softmax)


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
    inputs: tuple[Any, ...] = (q, k, v, gk, gv, bonus, initial_state, cu_seqlens)
    flags = (scale, output_final_state, state_v_first, softmax)
    plain = not (reverse or make)
    known = _calls.get((look(inputs), flags)) if plain else None
    if known is not None:
        return _run(inputs, known, output_final_state, softmax)
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
    inputs = (q, k, v, gk, gv, bonus, h0, cu_seqlens)
    scale = k.shape[-1] ** -0.5 if scale is None else float(scale)
    with on_device(q):
        if gv is None:
            call = VectorCall.make(k, v, scale, state_v_first, cu_seqlens, **make)
            if plain:
                _compile_ahead(_keys, _keys_backward, call, _of_keys(inputs), output_final_state)
        else:
            call = VectorCall.make(v, k, scale, not state_v_first, cu_seqlens, **make)
            if plain:
                _compile_ahead(_values, _values_backward, call, _of_values(inputs), output_final_state, softmax)
    known = _calls.add((look(inputs), flags), call) if plain else Known(call)
    return _run(inputs, known, output_final_state, softmax)


def _of_keys(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*inputs[:4], *inputs[5:])


def _of_values(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*inputs[:3], inputs[4], *inputs[6:])


def _run(inputs: tuple[Any, ...], known: Known, final: bool, softmax: bool) -> tuple[Tensor, Tensor | None]:
    train = needs_backward(inputs)
    found: tuple[Tensor, Tensor | None]
    if inputs[4] is None:
        found = served(_train_keys if train else _infer_keys, _of_keys(inputs), known, final, train)
    else:
        found = served(_train_values if train else _infer_values, _of_values(inputs), known, final, softmax, train)
    return found


def _infer_keys(inputs: tuple[Any, ...], known: Known, *static: bool) -> Any:
    return known.run("infer", _keys, inputs, *static)


def _infer_values(inputs: tuple[Any, ...], known: Known, *static: bool) -> Any:
    return known.run("infer", _values, inputs, *static)
