# SPDX-License-Identifier: MIT
"""Forward and backward of the short convolution by themselves, for callers that build their own autograd function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fla.backends import dispatch
from fla.modules.causal_conv1d.conv import FACTS, causal_conv1d, check_conv, covers_conv
from fla.ops._common.checks import ArgumentError
from fla.ops._common.single import once, savable

__all__ = ["CausalConv1dFunction", "causal_conv1d_bwd", "causal_conv1d_fwd"]

Grads = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def _check_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    initial_state: Tensor | None,
    activation: str | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
) -> None:
    check_conv(
        x, weight, bias, residual, initial_state, activation, "triton", cu_seqlens, cu_seqlens_cpu, None, None
    )  # fmt: skip


def _check_bwd(
    x: Tensor,
    dy: Tensor | None,
    dht: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    initial_state: Tensor | None,
    activation: str | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
) -> None:
    _check_fwd(x, weight, bias, residual, initial_state, activation, cu_seqlens, cu_seqlens_cpu)
    if dy is not None and dy.shape != x.shape:
        raise ArgumentError(f"`dy` must have the shape of `x`, {list(x.shape)}, got {list(dy.shape)}.")
    assert weight is not None
    N = x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    state = (N, weight.shape[0], weight.shape[-1])
    if dht is not None and dht.shape != state:
        raise ArgumentError(f"`dht` must have shape [N, D, W] = {list(state)}, got {list(dht.shape)}.")


@dispatch(
    "modules",
    facts=FACTS,
    validate=_check_fwd,
    triton="fla.modules.causal_conv1d.entry:causal_conv1d_fwd",
    triton_verifier=covers_conv,
    differentiable=False,
)
def causal_conv1d_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_size: int = 64,
    layout_fallback: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """:func:`causal_conv1d` without autograd; ``chunk_*`` and ``layout_fallback`` are accepted and not needed."""
    with torch.no_grad():
        return causal_conv1d.op.body(  # type: ignore[attr-defined]
            x, weight, bias, residual, initial_state, output_final_state, activation, "triton", cu_seqlens,
            cu_seqlens_cpu, None, None, None,
        )  # fmt: skip


@dispatch(
    "modules",
    facts=FACTS,
    validate=_check_bwd,
    triton="fla.modules.causal_conv1d.entry:causal_conv1d_bwd",
    triton_verifier=covers_conv,
    differentiable=False,
)
def causal_conv1d_bwd(
    x: Tensor,
    dy: Tensor | None,
    dht: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_size: int = 64,
    layout_fallback: bool = False,
) -> Grads:
    """Gradients of ``x``, ``weight``, ``bias``, ``residual`` and ``initial_state``; None for what was not given.

    Args:
        dy: like ``x``, gradient of ``y``; None counts as zero.
        dht: ``[N, D, W]``, gradient of the final state; None counts as zero.
        x, weight, bias, residual, initial_state, activation, cu_seqlens: as given to the forward pass.
    """
    assert weight is not None
    given = [x, weight, bias, residual, initial_state]
    with torch.enable_grad():
        leaves = [None if t is None else t.detach().requires_grad_() for t in given]
        y, final = causal_conv1d.op.body(  # type: ignore[attr-defined]
            *leaves, dht is not None, activation, "triton", cu_seqlens, cu_seqlens_cpu, None, None, None
        )  # fmt: skip
        flows = [(o, g) for o, g in ((y, dy), (final, dht)) if g is not None]
        wanted = [t for t in leaves if t is not None]
        found = iter(
            torch.autograd.grad(
                [o for o, _ in flows], wanted, [g.to(o.dtype) for o, g in flows], materialize_grads=True
            )
            if flows
            else map(torch.zeros_like, wanted)
        )
    dx, dw, db, dres, dstate = (None if t is None else next(found) for t in leaves)
    return dx, dw, db, dres, dstate


class CausalConv1dFunction(torch.autograd.Function):
    """Autograd over :func:`causal_conv1d_fwd` and :func:`causal_conv1d_bwd`; ``apply`` takes arguments in order."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        activation: str | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        chunk_indices: Tensor | None = None,
        chunk_size: int = 64,
    ) -> tuple[Tensor, Tensor | None]:
        if weight is None:
            raise ArgumentError("`weight` [D, W] must be given, got None.")
        ctx.save_for_backward(x, weight, bias, residual, initial_state, savable(cu_seqlens))
        ctx.activation, ctx.cu_seqlens_cpu = activation, cu_seqlens_cpu
        ctx.set_materialize_grads(False)
        return causal_conv1d_fwd(
            x, weight, bias, residual, initial_state, output_final_state, activation, cu_seqlens, cu_seqlens_cpu
        )

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor | None, dht: Tensor | None = None) -> tuple[Tensor | None, ...]:
        x, weight, bias, residual, state, cu_seqlens = ctx.saved_tensors
        grads = causal_conv1d_bwd(
            x, dy, dht, weight, bias, residual, state, ctx.activation, cu_seqlens, ctx.cu_seqlens_cpu
        )  # fmt: skip
        return (*grads, None, None, None, None, None, None)
