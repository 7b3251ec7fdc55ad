# SPDX-License-Identifier: MIT
"""Several linear layers on one input, whose gradients are summed while they are computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fla.modules._dtype import autocast_dtype
from fla.modules._plain import is_plain_linear
from fla.ops._common.single import once, transformed

__all__ = ["joinable", "joined", "linears"]


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = parameters[::2], parameters[1::2]
        ctx.save_for_backward(x, *weights)
        ctx.dtype = dtype
        ctx.biases = [None if bias is None else bias.dtype for bias in biases]
        ctx.set_materialize_grads(False)
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(dtype)
            return tuple(
                F.linear(x, weight.to(dtype), None if bias is None else bias.to(dtype))  # type: ignore[union-attr]
                for weight, bias in zip(weights, biases, strict=True)
            )

    @staticmethod
    @once
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        dx: Tensor | None = None
        of_parameters: list[Tensor | None] = []
        with torch.autocast(x.device.type, enabled=False):
            inputs = x.reshape(-1, x.shape[-1]).to(ctx.dtype)
            for i, (dy, weight) in enumerate(zip(gradients, weights, strict=True)):
                if dy is None:
                    of_parameters += [None, None]
                    continue
                rows = dy.reshape(-1, dy.shape[-1])
                if ctx.needs_input_grad[0]:
                    # The matrix product adds to what is there, which a sum of finished gradients would read once more.
                    w = weight.to(ctx.dtype)
                    dx = rows @ w if dx is None else dx.addmm_(rows, w)
                need_weight, need_bias = ctx.needs_input_grad[2 + 2 * i : 4 + 2 * i]
                of_parameters += [
                    (rows.t() @ inputs).to(weight.dtype) if need_weight else None,
                    rows.sum(0).to(ctx.biases[i]) if need_bias else None,
                ]
        return None if dx is None else dx.view(x.shape).to(x.dtype), None, *of_parameters


def linears(x: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """``layer(x)`` for each of ``layers``, joined where they can be."""
    return joined(x, layers) if joinable(x, layers) else tuple(layer(x) for layer in layers)


def joinable(x: Tensor, layers: Sequence[nn.Module]) -> bool:
    """Whether :func:`joined` saves time and leaves nothing out: in training on a device, for plain ``nn.Linear``."""
    return (
        torch.is_grad_enabled()
        and x.requires_grad
        and x.device.type not in ("cpu", "meta")
        and not torch.compiler.is_compiling()
        and not transformed()
        and len(layers) > 1
        and all(is_plain_linear(layer) and type(layer.weight) is nn.Parameter for layer in layers)
    )


def joined(x: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """``layer(x)`` for each of ``layers`` as one node of the graph.

    The gradients of ``x`` are summed by the products that compute them, in the dtype of the products, which saves a
    pass over memory for each.
    """
    parameters = [p for layer in layers for p in (layer.weight, layer.bias)]
    return _Linears.apply(x, autocast_dtype(x), *parameters)
