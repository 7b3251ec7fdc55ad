# SPDX-License-Identifier: MIT
"""Autograd of linear attention with one decay per head and token, or none, on the Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fla.backends import needs_backward
from fla.ops._common.device_index import known_table
from fla.ops._common.first_call import first_call
from fla.ops._common.launch import aligned, on_device
from fla.ops._common.room import like
from fla.ops._common.served import differentiable, served
from fla.ops._common.tape import Known, KnownCalls, look, refuse_transforms
from fla.ops._linear import scalar
from fla.ops._linear.kernels.scalar_scan import HEAD_DECAY, NO_DECAY, TOKEN_DECAY
from fla.ops._linear.policy import DECODE_TOKENS
from fla.ops._linear.scalar import Decays, ScalarCall


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, gamma: Tensor | None, h0: Tensor | None, cu: Tensor | None,
    call: ScalarCall, final: bool, save: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """(o, final state or None) and, with ``save``, what the backward needs: the sums of log decays, the states where
    stretches begin, the table of packed sequences."""
    call = call.on(cu)
    decays = Decays(scalar.decay_sums(call, g), gamma)
    entry = scalar.entries(call, k, v, decays, h0)
    mark = save and entry is None and call.marks > 1
    if mark:
        entry = scalar.marked(call, k)
    o, ht = scalar.forward(call, q, k, v, decays, h0, entry, final, mark=mark)
    return (o, ht, decays.sums, entry, call.table.rows, call.table.offsets) if save else (o, ht)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, gamma: Tensor | None, h0: Tensor | None, cu: Tensor | None,
    sums: Tensor | None, entry: Tensor | None, rows: Tensor | None, offsets: Tensor | None, do: Tensor,
    dht: Tensor | None, call: ScalarCall, into_state: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    if cu is not None and rows is not None and offsets is not None:
        call = call.packed(known_table(k.shape[1], call.plan.chunk, cu, rows, offsets))
    dh0 = like(h0) if into_state and h0 is not None else None
    decays = Decays(sums, gamma)
    if call.plan.thrice:
        return *scalar.thrice(call, q, k, v, do, decays, h0, dht, dh0, entry), None, None, dh0
    # The states are computed again: keeping them costs as much memory traffic as the pass itself.
    S, X, dv = scalar.states(call, q, k, v, do, decays, h0, dht, dh0, entry)
    dq, dk, dg = scalar.gradients(call, q, k, v, g, decays, do, S, X)
    return dq, dk, dv, dg, None, dh0


_train = differentiable("ScalarLinear", _forward, _backward, 5)
_calls = KnownCalls()


def _compile_ahead(call: ScalarCall, inputs: tuple[Tensor | None, ...], final: bool) -> None:
    """Have the kernels of a call compiled side by side."""
    train = needs_backward(inputs)
    into_state = inputs[5] is not None and inputs[5].requires_grad

    def step(*x: Tensor | None) -> None:
        o, _, *saved = _forward(*x, call, final, train)  # type: ignore[call-arg, arg-type]
        if train:
            _backward(*x, *saved, o, None, call, into_state)  # type: ignore[call-arg, arg-type]

    flags = (call.decay, call.v_first, call.segments > 1, call.marks > 1, call.tail, train, into_state)
    first_call(set(), "scalar linear", lambda: (call.plan, call.K, call.V, *flags), inputs, step)


def _c(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def scalar_linear(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor | None = None, g_gamma: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    reverse: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None, tokens: bool = False,
    **make: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Linear attention with a decay per token, per head or none; differentiable in all but ``g_gamma``.

    q, k `[B, T, H, K]`, v `[B, T, H, V]` of one 16- or 32-bit dtype; g `[B, T, H]` and g_gamma `[H]`: natural log
    decays, any float. ``tokens``: short calls without gradients go token by token. Arguments have been checked by the
    public functions.

    Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (2023), section 4.
    """
    inputs: tuple[Any, ...] = (q, k, v, g, g_gamma, initial_state, cu_seqlens)
    flags = (scale, output_final_state, state_v_first)
    short = tokens and k.shape[1] <= DECODE_TOKENS and not needs_backward(inputs)
    plain = not (short or reverse or make)
    known = _calls.get((look(inputs), flags)) if plain else None
    if known is not None:
        return _run(inputs, known, output_final_state)
    refuse_transforms(inputs)
    q, k, v = aligned(q), aligned(k), aligned(v)
    g, g_gamma, h0, cu = (_c(x) for x in (g, g_gamma, initial_state, cu_seqlens))
    scale = k.shape[-1] ** -0.5 if scale is None else float(scale)
    sequences = k.shape[0] if cu is None else cu.numel() - 1
    if k.numel() == 0 or v.numel() == 0 or sequences == 0:
        return _nothing_to_scan(
            q, k, v, h0, (sequences, k.shape[2], k.shape[3], v.shape[3]), output_final_state, state_v_first
        )
    with on_device(q):
        if short:
            return scalar.recurrent(
                q, k, v, g=g, gamma=g_gamma, scale=scale, state=h0, final=output_final_state, reverse=reverse,
                v_first=state_v_first, cu_seqlens=cu,
            )  # fmt: skip
        if reverse:
            return _reversed(
                q, k, v, g, h0, cu, g_gamma=g_gamma, scale=scale, output_final_state=output_final_state,
                state_v_first=state_v_first, **make,
            )  # fmt: skip
        decay = TOKEN_DECAY if g is not None else NO_DECAY if g_gamma is None else HEAD_DECAY
        call = ScalarCall.make(k, v, scale, decay, state_v_first, cu, **make)
        inputs = (q, k, v, g, g_gamma, h0, cu)
        if plain:
            _compile_ahead(call, inputs, output_final_state)
    known = _calls.add((look(inputs), flags), call) if plain else Known(call)
    return _run(inputs, known, output_final_state)


def _run(inputs: tuple[Any, ...], known: Known, final: bool) -> tuple[Tensor, Tensor | None]:
    train = needs_backward(inputs)
    found: tuple[Tensor, Tensor | None] = served(_train if train else _infer, inputs, known, final, train)
    return found


def _infer(inputs: tuple[Any, ...], known: Known, *static: bool) -> Any:
    return known.run("infer", _forward, inputs, *static)


def _reversed(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, h0: Tensor | None, cu_seqlens: Tensor | None, **kw: Any
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """From the last token to the first: the same on copies that run backwards, sequences in the opposite order too."""
    q, k, v = (x.flip(1) for x in (q, k, v))
    g = None if g is None else g.flip(1)
    if cu_seqlens is not None:
        cu_seqlens, h0 = k.shape[1] - cu_seqlens.flip(0), None if h0 is None else h0.flip(0)
    o, ht = scalar_linear(q, k, v, g=g, initial_state=h0, cu_seqlens=cu_seqlens, **kw)
    return o.flip(1), ht.flip(0) if ht is not None and cu_seqlens is not None else ht


def _nothing_to_scan(
    q: Tensor, k: Tensor, v: Tensor, h0: Tensor | None, size: tuple[int, int, int, int], final: bool, v_first: bool
) -> tuple[Tensor, Tensor | None]:
    N, H, K, V = size
    # Of axes of no length, but part of the graph as any other result.
    o = torch.zeros_like(v) + (q[..., :0].sum() + k[..., :0].sum() + v[..., :0].sum())
    if not final:
        return o, None
    shape = (N, H, V, K) if v_first else (N, H, K, V)
    return o, v.new_zeros(shape, dtype=torch.float32) if h0 is None else h0.float().clone()
