# SPDX-License-Identifier: MIT
"""Autograd of the vector-decay chunk engine (KDA)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fla.ops._common.ahead import ahead, possible
from fla.ops._common.launch import on_device
from fla.ops._delta.vector_work import VectorCall, Work


def _compile_ahead(work: Work, h0: Tensor | None, cu_seqlens: Tensor | None, final: bool) -> None:
    """Have the kernels of the forward and backward of a call compiled side by side."""

    def meta(x: Tensor | None) -> Tensor | None:
        return None if x is None else torch.empty_like(x, device="meta")

    inputs = [meta(x) for x in (work.q, work.k, work.v, work.g, work.beta, work.a_log, work.dt_bias, cu_seqlens)]
    with ahead(work.q.device), torch.no_grad():
        w = Work(work.call, *inputs)  # type: ignore[arg-type]
        w.prep(train=True)
        o, h0, dht = w.like(w.v), meta(h0), None
        states, news = w.state_buffers() if w.call.keep else (None, None)
        entries = w.scan(
            h0, o=o, ht=w.final_state() if final else None, states=states, save=2 if w.call.keep else 0, news=news
        )
        if states is None or news is None:
            states, news = w.states(h0, entries)
        _, ys, exits = w.scan_bwd(o, dht, None if h0 is None else torch.empty_like(h0))
        w.grad(o, o, states, news, exits, ys)


class VectorDelta(torch.autograd.Function):
    """Chunked delta rule with a decay per key channel. Returns (o, final state or None).

    Saved: the inputs, the output, the scaled tiles, the inverse and the scores of each chunk of 32 tokens; with
    ``call.keep`` also the states and new values, which are otherwise computed again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        a_log: Tensor | None,
        dt_bias: Tensor | None,
        h0: Tensor | None,
        cu_seqlens: Tensor | None,
        call: VectorCall,
        final: bool,
    ) -> tuple[Tensor, Tensor | None]:
        work = Work(call, q, k, v, g, beta, a_log, dt_bias, cu_seqlens)
        if not work.setup.ahead:
            work.setup.ahead = True
            if q.is_cuda and possible() and not torch.cuda.is_current_stream_capturing():
                _compile_ahead(work, h0, cu_seqlens, final)
        work.prep(train=True)
        o = work.like(v)
        ht = work.final_state() if final else None
        states, news = work.state_buffers() if call.keep else (None, None)
        entries = work.scan(h0, o=o, ht=ht, states=states, save=2 if call.keep else 0, news=news)
        ctx.save_for_backward(
            q, k, v, g, beta, a_log, dt_bias, h0, o,
            work.tiles, work.mats, work.decay, work.norms, entries, states, news,
        )  # fmt: skip
        ctx.call, ctx.table = call, work.table
        ctx.set_materialize_grads(False)
        return o, ht

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor | None, dht: Tensor | None) -> tuple[Any, ...]:
        q, k, v, g, beta, a_log, dt_bias, h0, o, tiles, mats, decay, norms, entries, states, news = ctx.saved_tensors
        if do is None and dht is None:
            return (None,) * 11
        do = torch.zeros_like(v) if do is None else do.contiguous()
        dht = None if dht is None else dht.contiguous()
        dh0 = torch.empty_like(h0) if ctx.needs_input_grad[7] else None
        with on_device(q):
            work = Work(ctx.call, q, k, v, g, beta, a_log, dt_bias, None, ctx.table)
            work.tiles, work.mats, work.decay, work.norms, work.nm = tiles, mats, decay, norms, 3
            if states is None:
                states, news = work.states(h0, entries)
            dv, ys, exits = work.scan_bwd(do, dht, dh0)
            dq, dk, dg, db, da, dbias = work.grad(o, do, states, news, exits, ys)
        return dq, dk, dv, dg, db, da, dbias, dh0, None, None, None
