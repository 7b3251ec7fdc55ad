# SPDX-License-Identifier: MIT
"""Triton path of the short convolution, with its gradient; same parameters as in :mod:`.conv`, checked there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fla.modules._written import written
from fla.modules.causal_conv1d import launch
from fla.ops._common.launch import on_device
from fla.ops._common.single import applied, once, savable


def _forward_body(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, state: Tensor | None,
    cu_seqlens: Tensor | None, silu: bool, final: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    call = launch.Call.make(x, weight.shape[-1], cu_seqlens)
    y = launch.conv_fwd(call, x, weight, bias, residual, state, silu)
    return y, launch.conv_final(call, x, state) if final else None


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, state: Tensor | None, final: bool,
    activation: str | None, cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """``y`` like ``x`` and the final state; no autograd."""
    rows = launch.rows_of(x)
    weight, bias, state = weight.contiguous(), _contiguous(bias), _contiguous(state)
    added = None if residual is None else launch.rows_of(residual)
    silu = activation is not None
    inputs = (rows, weight, bias, added, state, cu_seqlens)
    key = ("conv", *_sizes(rows, added), weight.shape[-1], _length(cu_seqlens), silu, final)
    with on_device(x):
        y, last = written(key, _forward_body, inputs, silu, final)
    return y if y.dim() == x.dim() else y.view(x.shape), last


def _backward_body(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, dy: Tensor, dfinal: Tensor | None,
    cu_seqlens: Tensor | None, silu: bool, need_x: bool, need_w: bool, need_state: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    call = launch.Call.make(x, weight.shape[-1], cu_seqlens, backward=True)
    dx = dw = db = dstate = None
    if need_x or need_w:
        dx, dw, db = launch.conv_bwd(call, x, weight, bias, state, dy, dfinal, silu, need_x, need_w)
    if need_state and state is not None:
        dstate = launch.conv_state_grad(call, x, weight, bias, state, dy, dfinal, silu)
    return dx, dw, db, dstate


def backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, dy: Tensor | None, dfinal: Tensor | None,
    activation: str | None, cu_seqlens: Tensor | None, needs: tuple[bool, bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of ``x``, ``weight``, ``bias`` and the initial state, where needed."""
    rows = launch.rows_of(x)
    weight, bias, state = weight.contiguous(), _contiguous(bias), _contiguous(state)
    dfinal = _contiguous(dfinal)
    dy = torch.zeros_like(rows) if dy is None else launch.rows_of(dy)
    static = activation is not None, needs[0], needs[1] or needs[2], needs[3]
    key = ("conv backward", *_sizes(rows, dy), weight.shape, _length(cu_seqlens), *static)
    with on_device(x):
        dx, dw, db, dstate = written(
            key, _backward_body, (rows, weight, bias, state, dy, dfinal, cu_seqlens), *static
        )  # fmt: skip
    if dx is not None and dx.dim() != x.dim():
        dx = dx.view(x.shape)
    return dx, dw if needs[1] else None, db if needs[2] else None, dstate


def _sizes(x: Tensor, y: Tensor | None) -> tuple[Any, ...]:
    return x.shape, x.stride(), None if y is None else y.stride()


def _length(cu_seqlens: Tensor | None) -> int | None:
    return None if cu_seqlens is None else cu_seqlens.shape[0]


def _contiguous(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.is_contiguous() else x.contiguous()


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        activation: str | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(x, weight, bias, initial_state, savable(cu_seqlens))
        ctx.activation = activation
        ctx.residual = None if residual is None else residual.dtype
        ctx.set_materialize_grads(False)
        return forward(x, weight, bias, residual, initial_state, output_final_state, activation, cu_seqlens)

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None = None) -> tuple[Tensor | None, ...]:
        x, weight, bias, state, cu_seqlens = ctx.saved_tensors
        need = ctx.needs_input_grad
        dx, dw, db, dstate = backward(
            x, weight, bias, state, dy, dfinal, ctx.activation, cu_seqlens, (need[0], need[1], need[2], need[4])
        )
        dres = dy.to(ctx.residual) if need[3] and dy is not None else None
        return dx, dw, db, dres, dstate, None, None, None


_conv = applied(_Conv)


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, activation: str | None = None,
    backend: str = "triton", cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None, cp_context: Any = None, *, seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    run = _conv if torch.is_grad_enabled() else forward
    return run(x, weight, bias, residual, initial_state, output_final_state, activation, cu_seqlens)


def causal_conv1d_update(
    x: Tensor, cache: Tensor, residual: Tensor | None = None, weight: Tensor | None = None,
    bias: Tensor | None = None, activation: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert weight is not None
    N, D, _ = cache.shape
    weight, bias = weight.contiguous(), _contiguous(bias)
    # A cache that is a slice of a larger one is shifted in a copy and written back.
    dense = cache.contiguous()
    rows, added = _rows(x, N, D), None if residual is None else _rows(residual, N, D)
    y = launch.conv_update(rows, dense, added, weight, bias, activation is not None)
    if dense is not cache:
        cache.copy_(dense)
    return y.view(x.shape), cache


def causal_conv1d_updates(
    q: Tensor, k: Tensor, v: Tensor, q_cache: Tensor, k_cache: Tensor, v_cache: Tensor, q_weight: Tensor,
    k_weight: Tensor, v_weight: Tensor, q_bias: Tensor | None = None, k_bias: Tensor | None = None,
    v_bias: Tensor | None = None, activation: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    N = q_cache.shape[0]
    rows = [_rows(x, N, x.shape[-1]) for x in (q, k, v)]
    parameters = [_contiguous(p) for p in (q_weight, k_weight, v_weight, q_bias, k_bias, v_bias)]
    ys = launch.conv_updates(rows, [q_cache, k_cache, v_cache], parameters, activation is not None)
    return ys[0].view(q.shape), ys[1].view(k.shape), ys[2].view(v.shape)


def _rows(x: Tensor, N: int, D: int) -> Tensor:
    x = x.reshape(N, D)
    return x if x.stride(1) == 1 or D == 1 else x.contiguous()


def causal_conv1d_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, initial_state: Tensor | None = None,
    output_final_state: bool = False, activation: str | None = None, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, chunk_indices: Tensor | None = None, chunk_size: int = 64,
    layout_fallback: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    return forward(x, weight, bias, residual, initial_state, output_final_state, activation, cu_seqlens)


def causal_conv1d_bwd(
    x: Tensor, dy: Tensor, dht: Tensor | None, weight: Tensor | None = None, bias: Tensor | None = None,
    residual: Tensor | None = None, initial_state: Tensor | None = None, activation: str | None = None,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, chunk_indices: Tensor | None = None,
    chunk_size: int = 64, layout_fallback: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    assert weight is not None
    needs = (True, True, bias is not None, initial_state is not None)
    dx, dw, db, dstate = backward(x, weight, bias, initial_state, dy, dht, activation, cu_seqlens, needs)
    dres = None
    if residual is not None:
        dres = torch.zeros_like(residual) if dy is None else dy.to(residual.dtype)
    return dx, dw, db, dres, dstate
