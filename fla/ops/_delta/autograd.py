# SPDX-License-Identifier: MIT
"""Autograd of the scalar-decay delta rule on the Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fla.backends import needs_backward
from fla.ops._common.device_index import chunk_table, known_table
from fla.ops._common.first_call import first_call
from fla.ops._common.launch import aligned, on_device
from fla.ops._common.room import carve, like, room_for, total
from fla.ops._common.served import differentiable, served
from fla.ops._common.tape import Known, KnownCalls, look
from fla.ops._delta import scalar
from fla.ops._delta.scalar import Passed, ScalarCall


def _empty_result(call: ScalarCall, v: Tensor, h0: Tensor | None, final: bool) -> tuple[Tensor, Any]:
    if not final:
        return torch.zeros_like(v), None
    size = scalar.state_shape(call, call.shape)
    return torch.zeros_like(v), v.new_zeros(size, dtype=torch.float32) if h0 is None else h0.float().clone()


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
    h0: Tensor | None, read: Tensor | None, cu: Tensor | None, call: ScalarCall, final: bool, save: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """(o, final state) and, with ``save``, what the backward needs of its own."""
    if cu is not None:
        call = call.packed(chunk_table(k.shape[0], k.shape[1], call.plan.chunk, cu))
    room = room_for(scalar.prepared(call, k), k)
    T, A, sc, long = scalar.prepare(call, q, k, v, g, beta, A_log, dt_bias, save, read, None, room)
    entry = scalar.entries(call, q, k, v, T, A, sc, h0, read, long)
    o, ht, _, _ = scalar.scan(call, q, k, v, T, A, sc, h0, entry, True, final, False, read, long)
    if call.other is not None:
        wide = scalar.prepare(call.other, q, k, v, g, beta, A_log, dt_bias, False, read, long)[:3]
        scalar.scan(call.other, q, k, v, *wide, h0, None, True, final, False, read, long, (o, ht))
    return (o, ht, room, entry, long, call.table.rows, call.table.offsets) if save else (o, ht)


def _passes(
    call: ScalarCall, q: Tensor, k: Tensor, v: Tensor, T: Tensor, A: Tensor, sc: Tensor, h0: Tensor | None,
    entry: Tensor | None, read: Tensor | None, do: Tensor, dht: Tensor | None, dh0: Tensor | None, long: Tensor | None,
    into: Tensor | None,
) -> Passed:  # fmt: skip
    _, _, S, U = scalar.scan(call, q, k, v, T, A, sc, h0, entry, False, False, True, read, long)
    assert S is not None
    assert U is not None
    dv, X = scalar.reverse(call, q, k, do, T, A, sc, dht, dh0, read, long, into)
    return Passed(dv, S, U, X, sc)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
    h0: Tensor | None, read: Tensor | None, cu: Tensor | None, o: Tensor | None, room: Tensor, entry: Tensor | None,
    long: Tensor | None, rows: Tensor | None, offsets: Tensor | None, do: Tensor, dht: Tensor | None, call: ScalarCall,
    into_state: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    if cu is not None and rows is not None and offsets is not None:
        call = call.packed(known_table(k.shape[1], call.plan.chunk, cu, rows, offsets))
    T, A, sc = carve(room, scalar.prepared(call, k))
    dh0 = like(h0) if into_state and h0 is not None else None
    # The states are computed again: keeping them costs as much memory traffic as the pass itself.
    passed = _passes(call, q, k, v, T, A, sc, h0, entry, read, do, dht, dh0, long, None)
    dv = passed.dv

    def again() -> Passed:
        assert call.other is not None
        wide = scalar.prepare(call.other, q, k, v, g, beta, A_log, dt_bias, True, read, long)[:3]
        return _passes(call.other, q, k, v, *wide, h0, None, read, do, dht, dh0, long, dv)

    r = scalar.gradients(call, q, k, v, g, beta, A_log, dt_bias, do, passed, read, o, long, again)
    dg = None if r.dg is None or g is None else r.dg.to(g.dtype)
    dA = dbias = None
    if r.dy is not None and A_log is not None:
        assert r.dg is not None
        dA = total(r.dy, 0, 1).reshape(A_log.shape).to(A_log.dtype)
        if dt_bias is not None:
            dbias = total(r.dg, 0, 1).reshape(dt_bias.shape).to(dt_bias.dtype)
    return r.dq, r.dk, dv, dg, r.dbeta.to(beta.dtype), dA, dbias, dh0, r.dread


_train = differentiable("ScalarDelta", _forward, _backward, 7, lambda call, *static: call.keeps_output)
_calls = KnownCalls()


def _compile_ahead(call: ScalarCall, inputs: tuple[Any, ...], final: bool) -> None:
    """Have the kernels of a call compiled side by side."""
    train = needs_backward(inputs)
    into_state = inputs[7] is not None and inputs[7].requires_grad

    def step(*x: Tensor | None) -> None:
        o, _, *saved = _forward(*x, call, final, train)  # type: ignore[call-arg, arg-type]
        if train:
            kept = o if call.keeps_output else None
            _backward(*x, kept, *saved, o, None, call, into_state)  # type: ignore[call-arg, arg-type]

    s = call.shape
    flags = (
        call.norm,
        call.v_first,
        call.before,
        call.beta_scale > 0,
        call.segments > 1,
        call.tail,
        s.HV > s.H,
        train,
        into_state,
    )
    first_call(set(), "scalar", lambda: (call.plan, s.K, s.V, *flags), inputs, step)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, *, scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool, norm: bool, beta_scale: float = 0.0, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, v_first: bool = False, cu_seqlens: Tensor | None = None, read: Tensor | None = None,
    before: bool = False, **make: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Chunked delta rule with no decay (``g`` None) or a scalar one, differentiable in every tensor.

    q, k `[B, T, H, K]`, v `[B, T, HV, V]` of one 16- or 32-bit dtype; g, beta `[B, T, HV]`, any float. ``g`` is the
    natural log of the decay, or the gate's input where ``A_log`` `[HV]` is given. ``beta_scale`` not 0: beta goes
    through ``beta_scale * sigmoid``. ``read``: a read key of its own, like k; ``before``: the state is read before its
    decay. ``make`` fixes the plan, for checks. Arguments have been checked by the public functions.
    """
    inputs: tuple[Any, ...] = (q, k, v, g, beta, A_log, dt_bias, initial_state, read, cu_seqlens)
    flags = (scale, output_final_state, norm, beta_scale, v_first, before)
    known = None if make else _calls.get((look(inputs), flags))
    if known is not None:
        return _run(inputs, known, output_final_state)
    q, k, v, beta = aligned(q), aligned(k), aligned(v), beta.contiguous()
    read = None if read is None else aligned(read)
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state, read, cu_seqlens)
    inputs = tuple(None if x is None else x.contiguous() for x in inputs)
    key = (look(inputs), flags)
    known = None if make else _calls.get(key)
    if known is None:
        # A float: compiled kernels are told apart by what is given as a tensor or constexpr, not by a number's type.
        scale = k.shape[-1] ** -0.5 if scale is None else float(scale)
        with on_device(q):
            call = ScalarCall.make(
                k, v, scale, norm, beta_scale, v_first, cu_seqlens, read=read is not None, before=before, **make
            )
            if k.numel() == 0 or v.numel() == 0 or call.table.sequences == 0:
                return _empty_result(call, v, inputs[7], output_final_state)
            if not make:
                _compile_ahead(call, inputs, output_final_state)
        known = Known(call) if make else _calls.add(key, call)
    return _run(inputs, known, output_final_state)


def _run(inputs: tuple[Any, ...], known: Known, final: bool) -> tuple[Tensor, Tensor | None]:
    if known.call.table.varlen:
        # The call came with a table of its own.
        inputs = (*inputs[:-1], None)
    train = needs_backward(inputs)
    found: tuple[Tensor, Tensor | None] = served(_train if train else _infer, inputs, known, final, train)
    return found


def _infer(inputs: tuple[Any, ...], known: Known, *static: bool) -> Any:
    return known.run("infer", _forward, inputs, *static)
