# SPDX-License-Identifier: MIT
"""Autograd of the vector-decay chunk engine (KDA)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fla.backends import needs_backward
from fla.ops._common.device_index import known_table
from fla.ops._common.first_call import first_call
from fla.ops._common.room import like
from fla.ops._common.served import differentiable
from fla.ops._common.tape import Known
from fla.ops._delta.vector_work import VectorCall, Work


def compile_ahead(call: VectorCall, inputs: tuple[Any, ...], final: bool) -> None:
    """Have the kernels of a call compiled side by side; ``inputs`` as those of `_forward`."""
    train = needs_backward(inputs)
    into_state = inputs[7] is not None and inputs[7].requires_grad

    def step(*x: Tensor | None) -> None:
        if train:
            o, _, *saved = _forward(*x, call, final)  # type: ignore[call-arg, arg-type]
            _backward(*x, o, *saved, o, None, call, into_state)  # type: ignore[call-arg, arg-type]
        else:
            _infer(*x, call, final)  # type: ignore[call-arg, arg-type]

    cu = inputs[8]
    table = None if cu is None else known_table(inputs[0].shape[1], 64, cu, cu, cu)  # not read, only measured
    w = Work(call, *inputs[:7], None, table)  # type: ignore[call-arg]
    key = (call, w.plan, w.K, w.V, w.ragged, w.gtma, w.btma, w.H > w.HK, cu is None, final, train, into_state)
    first_call(set(), "vector", lambda: key, inputs, step)


def _infer(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, a_log: Tensor | None, dt_bias: Tensor | None,
    h0: Tensor | None, cu_seqlens: Tensor | None, call: VectorCall, final: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    work = Work(call, q, k, v, g, beta, a_log, dt_bias, cu_seqlens)
    work.prep(train=False)
    o = work.like(v)
    ht = work.final_state() if final else None
    work.scan(h0, o=o, ht=ht)
    again(work, h0, o, ht)
    return o, ht


def again(
    work: Work, h0: Tensor | None, o: Tensor, ht: Tensor | None, states: Tensor | None = None, save: int = 0
) -> None:
    """The same once more, for what float16 has no room for."""
    other = work.other()
    if other is not None:
        other.prep(train=False)
        other.scan(h0, o=o, ht=ht, states=states, save=save)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, a_log: Tensor | None, dt_bias: Tensor | None,
    h0: Tensor | None, cu_seqlens: Tensor | None, call: VectorCall, final: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    work = Work(call, q, k, v, g, beta, a_log, dt_bias, cu_seqlens)
    work.prep(train=True)
    o = work.like(v)
    ht = work.final_state() if final else None
    states, news = work.state_buffers() if call.keep else (None, None)
    entries = work.scan(h0, o=o, ht=ht, states=states, save=2 if call.keep else 0, news=news)
    again(work, h0, o, ht)
    rows, offsets = work.table.rows, work.table.offsets
    return o, ht, work.room, entries, states, news, work.long, rows, offsets


def _backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, a_log: Tensor | None, dt_bias: Tensor | None,
    h0: Tensor | None, cu: Tensor | None, o: Tensor | None, room: Tensor, entries: Tensor | None, states: Tensor | None,
    news: Tensor | None, long: Tensor | None, rows: Tensor | None, offsets: Tensor | None, do: Tensor,
    dht: Tensor | None, call: VectorCall, into_state: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    dh0 = like(h0) if into_state and h0 is not None else None
    table = None
    if cu is not None and rows is not None and offsets is not None:
        table = known_table(q.shape[1], 64, cu, rows, offsets)
    work = Work(call, q, k, v, g, beta, a_log, dt_bias, None, table, long)
    work.carve(room, train=True)
    if states is None or news is None:
        states, news = work.states(h0, entries)
    dv, ys, exits = work.scan_bwd(do, dht, dh0)
    r = work.gradients()
    work.grad(o, do, states, news, exits, ys, r)
    other = work.other()
    if other is not None:
        del states, news, ys, exits
        other.prep(train=True)
        states, news = other.states(h0)
        _, ys, exits = other.scan_bwd(do, dht, dh0, dv)
        other.grad(o, do, states, news, exits, ys, r)
    dq, dk, dg, db, da, dbias = work.summed(r)
    return dq, dk, dv, dg, db, da, dbias, dh0


def infer(inputs: tuple[Tensor | None, ...], known: Known, final: bool) -> Any:
    """(o, final state or None) without gradients; ``inputs`` as those of `_forward`, `cu_seqlens` included."""
    return known.run("infer", _infer, inputs, final)


# Saved: the inputs, the output where q and k are normed (only what the norms take away from the gradients needs it; one
# that is not saved may be written to), the scaled tiles, the inverse and the scores of each chunk of 32 tokens; with
# ``call.keep`` also the states and new values, which are otherwise computed again.
train = differentiable("VectorDelta", _forward, _backward, 7, lambda call, final: call.norm)
