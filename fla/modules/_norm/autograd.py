# SPDX-License-Identifier: MIT
"""Autograd of the norms on the Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fla.backends import needs_backward
from fla.modules._dtype import autocast_dtype
from fla.modules._norm.engine import NormCall, norm_backward, norm_forward
from fla.ops._common.launch import on_device


def _c(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


class Norm(torch.autograd.Function):
    """``(y, stream or None)``; see `norm`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor | None, b: Tensor | None, res: Tensor | None, g: Tensor | None,
        call: NormCall, stream: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        r = norm_forward(call, x, w, b, res, g, True)
        # The rounded stream stands in for the sum: it is alive anyway wherever there is a next layer.
        ctx.save_for_backward(x if res is None else r.stream, w, b, g, r.mean, r.rstd)
        ctx.call, ctx.x_dtype = call, x.dtype
        ctx.res_dtype = None if res is None else res.dtype
        ctx.set_materialize_grads(False)
        return r.y, r.stream if stream else None

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor | None, ds: Tensor | None = None) -> tuple[Tensor | None, ...]:
        s, w, b, g, mean, rstd = ctx.saved_tensors
        if dy is None and ds is None:
            return (None,) * 7
        needs = ctx.needs_input_grad
        dy = torch.zeros_like(s, dtype=ctx.call.out_dtype or ctx.x_dtype) if dy is None else dy.contiguous()
        with on_device(s):
            dx, dres, dg, dw, db, _ = norm_backward(
                ctx.call, dy, _c(ds), s, w, b, g, mean, rstd, ctx.x_dtype, ctx.res_dtype if needs[3] else None,
                needs[1], needs[2],
            )  # fmt: skip
        return dx, dw, db, dres, dg, None, None


def norm(
    x: Tensor, w: Tensor | None, b: Tensor | None, res: Tensor | None, g: Tensor | None, call: NormCall, prenorm: bool
) -> Any:
    """``norm(x + residual)``, gated; with ``prenorm`` also the residual stream. Arguments have been checked."""
    x, w, b, res, g = x.contiguous(), _c(w), _c(b), _c(res), _c(g)
    call, own_stream = _with_stream(call, x, res, prenorm)
    with on_device(x):
        if needs_backward((x, w, b, res, g)):
            if res is not None and call.stream_dtype is None:
                call = call._replace(stream_dtype=res.dtype)
            y, stream = Norm.apply(x, w, b, res, g, call, prenorm and own_stream)
        else:
            y, stream, _, _ = norm_forward(call, x, w, b, res, g, False)
    if prenorm:
        return y, stream if own_stream else x
    return y


def _with_stream(call: NormCall, x: Tensor, res: Tensor | None, prenorm: bool) -> tuple[NormCall, bool]:
    """The call with the dtype of its residual stream, and whether that is another tensor than ``x``."""
    if not prenorm:
        return call._replace(stream_dtype=None), False
    if res is not None:
        return call._replace(stream_dtype=res.dtype), True
    wanted = call.stream_dtype or x.dtype
    return (
        (call._replace(stream_dtype=wanted), True) if wanted != x.dtype else (call._replace(stream_dtype=None), False)
    )


class NormLinear(torch.autograd.Function):
    """``F.linear(norm, weight, bias)`` that keeps the input of the norm only and computes its result again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor | None, b: Tensor | None, res: Tensor | None, g: Tensor | None,
        weight: Tensor, bias: Tensor | None, call: NormCall, stream: bool, dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        r = norm_forward(call, x, w, b, res, g, True)
        ctx.save_for_backward(x if res is None else r.stream, w, b, g, r.mean, r.rstd, weight)
        ctx.call, ctx.x_dtype, ctx.dtype = call, x.dtype, dtype
        ctx.res_dtype = None if res is None else res.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        with torch.autocast(x.device.type, enabled=False):
            out = F.linear(r.y.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        return out, r.stream if stream else None

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, ds: Tensor | None = None) -> tuple[Tensor | None, ...]:
        s, w, b, g, mean, rstd, weight = ctx.saved_tensors
        if dout is None and ds is None:
            return (None,) * 10
        needs = ctx.needs_input_grad
        if dout is None:
            dout = s.new_zeros(*s.shape[:-1], weight.shape[0], dtype=ctx.dtype)
        with on_device(s), torch.autocast(s.device.type, enabled=False):
            dy = (dout @ weight.to(ctx.dtype)).to(ctx.x_dtype)
            dx, dres, dg, dw, db, y = norm_backward(
                ctx.call, dy, _c(ds), s, w, b, g, mean, rstd, ctx.x_dtype, ctx.res_dtype if needs[3] else None,
                needs[1], needs[2], again=needs[5],
            )  # fmt: skip
            d_weight = d_bias = None
            flat = dout.reshape(-1, dout.shape[-1])
            if y is not None:
                d_weight = (flat.t() @ y.to(ctx.dtype).view(-1, y.shape[-1])).to(weight.dtype)
            if needs[6]:
                d_bias = flat.sum(0).to(ctx.bias_dtype)
        return dx, dw, db, dres, dg, d_weight, d_bias, None, None, None


def norm_linear(
    x: Tensor, w: Tensor | None, b: Tensor | None, res: Tensor | None, g: Tensor | None, weight: Tensor,
    bias: Tensor | None, call: NormCall, prenorm: bool,
) -> Any:  # fmt: skip
    """`norm` followed by a linear layer in the dtype of ``x``, or autocast's."""
    if not needs_backward((x, w, b, res, g, weight, bias)):
        y = norm(x, w, b, res, g, call, prenorm)
        h, dtype = y[0] if prenorm else y, autocast_dtype(x)
        out = F.linear(h.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        return (out, y[1]) if prenorm else out
    x, w, b, res, g = x.contiguous(), _c(w), _c(b), _c(res), _c(g)
    call, own_stream = _with_stream(call, x, res, prenorm)
    if res is not None and call.stream_dtype is None:
        call = call._replace(stream_dtype=res.dtype)
    with on_device(x):
        out, stream = NormLinear.apply(
            x, w, b, res, g, weight, bias, call, prenorm and own_stream, autocast_dtype(x)
        )  # fmt: skip
    return (out, stream if own_stream else x) if prenorm else out
