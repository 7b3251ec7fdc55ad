# SPDX-License-Identifier: MIT
"""Autograd of the norms on the Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fla.modules._dtype import autocast_dtype
from fla.modules._norm.engine import NormCall, norm_backward, norm_forward
from fla.modules._written import written
from fla.ops._common.launch import on_device
from fla.ops._common.single import applied, once


def _c(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _wants_gradient(*tensors: Tensor | None) -> bool:
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


def _stream_dtype(x: Tensor, res: Tensor | None, prenorm: bool, in_fp32: bool) -> torch.dtype | None:
    """Dtype of the residual stream that is returned; None: none is, or ``x`` is that stream."""
    if not prenorm:
        return None
    if res is not None:
        return res.dtype
    return torch.float32 if in_fp32 and x.dtype != torch.float32 else None


def _forward_body(
    x: Tensor, w: Tensor | None, b: Tensor | None, res: Tensor | None, g: Tensor | None, call: NormCall,
    stream_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    return norm_forward(call, x, w, b, res, g, stream_dtype)[:2]


def _forward(
    x: Tensor, w: Tensor | None, b: Tensor | None, res: Tensor | None, g: Tensor | None, call: NormCall,
    stream_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The result and the residual stream of contiguous tensors."""
    found: tuple[Tensor, Tensor | None] = written(
        ("norm", x.shape, call, stream_dtype), _forward_body, (x, w, b, res, g), call, stream_dtype
    )
    return found


def _backward_body(
    dy: Tensor, ds: Tensor | None, s: Tensor, w: Tensor | None, b: Tensor | None, g: Tensor | None, call: NormCall,
    x_dtype: torch.dtype, res_dtype: torch.dtype | None, need_w: bool, need_b: bool, again: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    return norm_backward(call, dy, ds, s, w, b, g, x_dtype, res_dtype, need_w, need_b, again)


def _backward(
    dy: Tensor, ds: Tensor | None, s: Tensor, w: Tensor | None, b: Tensor | None, g: Tensor | None, *static: Any
) -> tuple[Tensor | None, ...]:
    """``(dx, dresidual, dg, dw, db, y)``; ``static`` as in `_backward_body`."""
    # Parameters come in any shape, and so do their gradients.
    shapes = None if w is None else w.shape, None if b is None else b.shape
    key = ("norm backward", s.shape, *shapes, *static)
    found: tuple[Tensor | None, ...] = written(key, _backward_body, (dy, ds, s, w, b, g), *static)
    return found


class Norm(torch.autograd.Function):
    """``(y, stream)``, or ``y`` where there is no stream; see `norm`. With ``passes`` the stream is ``x``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor | None, b: Tensor | None, res: Tensor | None, g: Tensor | None, call: NormCall,
        stream_dtype: torch.dtype | None, passes: bool,
    ) -> Any:  # fmt: skip
        if res is None:
            y, stream = _forward(x, w, b, None, g, call, stream_dtype)
            ctx.save_for_backward(x, w, b, g)
            ctx.res_dtype = None
        else:
            # The rounded stream stands in for the sum: it is alive anyway wherever there is a next layer. Always an
            # output, as what is saved says on what a gradient depends.
            y, stream = _forward(x, w, b, res, g, call, res.dtype)
            ctx.save_for_backward(stream, w, b, g)
            ctx.res_dtype = res.dtype
        ctx.call, ctx.x_dtype = call, x.dtype
        if stream_dtype is None and res is None and not passes:
            return y
        ctx.set_materialize_grads(False)
        return y, x if passes else stream

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor | None, ds: Tensor | None = None) -> tuple[Tensor | None, ...]:
        s, w, b, g = ctx.saved_tensors
        if dy is None:
            if ds is None:
                return (None,) * 8
            dy = torch.zeros_like(s, dtype=ctx.call.out_dtype or ctx.x_dtype)
        _, need_w, need_b, need_res, *_ = ctx.needs_input_grad
        with on_device(s):
            dx, dres, dg, dw, db, _ = _backward(
                dy.contiguous(), _c(ds), s, w, b, g, ctx.call, ctx.x_dtype, ctx.res_dtype if need_res else None,
                need_w, need_b, False,
            )  # fmt: skip
        return dx, dw, db, dres, dg, None, None, None


_norm = applied(Norm)


def norm(
    x: Tensor, w: Tensor | None, b: Tensor | None, res: Tensor | None, g: Tensor | None, call: NormCall,
    prenorm: bool = False, in_fp32: bool = False,
) -> Any:  # fmt: skip
    """``norm(x + residual)``, gated; with ``prenorm`` also the residual stream. Arguments have been checked."""
    x, w, b, res, g = x.contiguous(), _c(w), _c(b), _c(res), _c(g)
    stream_dtype = _stream_dtype(x, res, prenorm, in_fp32)
    with on_device(x):
        if _wants_gradient(x, w, b, res, g):
            # A stream that is x goes through the node too, which then adds up the gradients of both.
            passes = prenorm and stream_dtype is None and x.requires_grad
            out = _norm(x, w, b, res, g, call, stream_dtype, passes)
            if passes or stream_dtype is not None:
                return out
            if res is not None:
                out = out[0]
        else:
            out, stream = _forward(x, w, b, res, g, call, stream_dtype)
            if stream is not None:
                return out, stream
    return (out, x) if prenorm else out


class NormLinear(torch.autograd.Function):
    """``F.linear(norm, weight, bias)`` that keeps the input of the norm only and computes its result again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor | None, b: Tensor | None, res: Tensor | None, g: Tensor | None,
        weight: Tensor, bias: Tensor | None, call: NormCall, stream_dtype: torch.dtype | None, dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        y, stream = _forward(x, w, b, res, g, call, stream_dtype if res is None else res.dtype)
        ctx.save_for_backward(x if res is None else stream, w, b, g, weight)
        ctx.call, ctx.x_dtype, ctx.dtype = call, x.dtype, dtype
        ctx.res_dtype = None if res is None else res.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        with torch.autocast(x.device.type, enabled=False):
            out = F.linear(y.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        return out, None if stream_dtype is None and res is None else stream

    @staticmethod
    @once
    def backward(ctx: Any, dout: Tensor | None, ds: Tensor | None = None) -> tuple[Tensor | None, ...]:
        s, w, b, g, weight = ctx.saved_tensors
        if dout is None and ds is None:
            return (None,) * 10
        needs = ctx.needs_input_grad
        if dout is None:
            dout = s.new_zeros(*s.shape[:-1], weight.shape[0], dtype=ctx.dtype)
        with on_device(s), torch.autocast(s.device.type, enabled=False):
            dy = (dout @ weight.to(ctx.dtype)).to(ctx.x_dtype)
            dx, dres, dg, dw, db, y = _backward(
                dy, _c(ds), s, w, b, g, ctx.call, ctx.x_dtype, ctx.res_dtype if needs[3] else None, needs[1],
                needs[2], needs[5],
            )  # fmt: skip
            d_weight = d_bias = None
            flat = dout.reshape(-1, dout.shape[-1])
            if y is not None:
                d_weight = (flat.t() @ y.to(ctx.dtype).view(-1, y.shape[-1])).to(weight.dtype)
            if needs[6]:
                d_bias = flat.sum(0).to(ctx.bias_dtype)
        return dx, dw, db, dres, dg, d_weight, d_bias, None, None, None


_norm_linear = applied(NormLinear)


def norm_linear(
    x: Tensor, w: Tensor | None, b: Tensor | None, res: Tensor | None, g: Tensor | None, weight: Tensor,
    bias: Tensor | None, call: NormCall, prenorm: bool, in_fp32: bool,
) -> Any:  # fmt: skip
    """`norm` followed by a linear layer in the dtype of ``x``, or autocast's."""
    if not _wants_gradient(x, w, b, res, g, weight, bias):
        y = norm(x, w, b, res, g, call, prenorm, in_fp32)
        h, dtype = y[0] if prenorm else y, autocast_dtype(x)
        out = F.linear(h.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        return (out, y[1]) if prenorm else out
    x, w, b, res, g = x.contiguous(), _c(w), _c(b), _c(res), _c(g)
    stream_dtype = _stream_dtype(x, res, prenorm, in_fp32)
    with on_device(x):
        out, stream = _norm_linear(x, w, b, res, g, weight, bias, call, stream_dtype, autocast_dtype(x))
    return (out, x if stream is None else stream) if prenorm else out
