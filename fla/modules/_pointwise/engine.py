# SPDX-License-Identifier: MIT
"""Launches of the elementwise kernels, and their autograd."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fla.modules._dtype import autocast_dtype
from fla.modules._pointwise.kernels import pointwise_bwd_kernel, pointwise_fwd_kernel
from fla.modules._written import written
from fla.ops._common.launch import Fixed, Launcher, on_device
from fla.ops._common.single import applied, once

SIGMOID, SWISH, LOGSIGMOID, ELU_P1, SQRELU, GELU, POWER = range(7)

# Two vectors of 16 bytes a thread of each 16-bit tensor.
BLOCK, WARPS = 2048, 4
# Beyond, element numbers need 64 bits.
WIDE = (1 << 31) - 1 - BLOCK

_forward = Launcher(pointwise_fwd_kernel)
_backward = Launcher(pointwise_bwd_kernel)


def row_stride(x: Tensor) -> int | None:
    """The distance between rows where that is one number, else None."""
    if x.dim() < 2 or x.stride(-1) != 1:
        return None
    shape, strides = x.shape, x.stride()
    for d in range(x.dim() - 2):
        if shape[d] != 1 and strides[d] != strides[d + 1] * shape[d + 1]:
            return None
    return strides[-2] or None  # 0 would be an expanded row


def _read(x: Tensor) -> tuple[Tensor, int]:
    """``x`` as the kernels read it, and the distance between its rows; 0: it is contiguous."""
    if x.is_contiguous():
        return x, 0
    stride = row_stride(x)
    return (x.contiguous(), 0) if stride is None else (x, stride)


@functools.lru_cache(maxsize=512)
def _forward_launch(op: int, D: int, sx: int, sy: int, wide: bool, even: bool) -> Fixed:
    meta = {"OP": op, "D": D, "SX": sx, "SY": sy, "BLOCK": BLOCK, "WIDE": wide, "EVEN": even}
    return _forward.fix(meta, {"num_warps": WARPS})


@functools.lru_cache(maxsize=512)
def _backward_launch(op: int, D: int, sx: int, sy: int, sg: int, again: bool, wide: bool, even: bool) -> Fixed:
    meta = {
        "OP": op, "D": D, "SX": sx, "SY": sy, "SG": sg, "AGAIN": again, "BLOCK": BLOCK, "WIDE": wide, "EVEN": even
    }  # fmt: skip
    return _backward.fix(meta, {"num_warps": WARPS})


def _empty(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def pointwise_forward(
    op: int, x: Tensor, y: Tensor | None = None, param: float = 1.0, dtype: torch.dtype | None = None
) -> Tensor:
    """``f(x)``, or ``f(x) * y``, contiguous and in ``dtype`` (that of ``x`` when None)."""
    z = _empty(x, dtype)
    n = z.numel()
    if n == 0:
        return z
    x, sx = _read(x)
    y, sy = (None, 0) if y is None else _read(y)
    even = n % 16 == 0
    launch = _forward_launch(op, x.shape[-1] if sx or sy else 0, sx, sy, n > WIDE, even)
    launch(-(-n // BLOCK), (x, y, z, n // 16 if even else n, float(param)), (x, y, z))
    return z


def pointwise_backward(
    op: int, x: Tensor, y: Tensor | None, dz: Tensor, param: float = 1.0, again: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """``(dx, dy, z)``; ``z``, the forward's result, with ``again`` only."""
    dx = _empty(x)
    dy = None if y is None else _empty(y)
    z = torch.empty_like(dx) if again else None
    n = dx.numel()
    if n == 0:
        return dx, dy, z
    (x, sx), (dz, sg) = _read(x), _read(dz)
    y, sy = (None, 0) if y is None else _read(y)
    even = n % 16 == 0
    D = x.shape[-1] if sx or sy or sg else 0
    launch = _backward_launch(op, D, sx, sy, sg, again, n > WIDE, even)
    launch(-(-n // BLOCK), (x, y, dz, dx, dy, z, n // 16 if even else n, float(param)), (x, y, dz, dx, dy, z))
    return dx, dy, z


def _forward_body(x: Tensor, y: Tensor | None, op: int, param: float, dtype: torch.dtype | None) -> tuple[Tensor]:
    return (pointwise_forward(op, x, y, param, dtype),)


def _run_forward(op: int, x: Tensor, y: Tensor | None, param: float, dtype: torch.dtype | None) -> Tensor:
    key = ("pointwise", x.shape, x.stride(), None if y is None else y.stride(), op, param, dtype)
    found: Tensor = written(key, _forward_body, (x, y), op, param, dtype)[0]
    return found


def _backward_body(x: Tensor, y: Tensor | None, dz: Tensor, op: int, param: float) -> tuple[Tensor, Tensor | None]:
    return pointwise_backward(op, x, y, dz, param)[:2]


def _run_backward(op: int, x: Tensor, y: Tensor | None, dz: Tensor, param: float) -> tuple[Tensor, Tensor | None]:
    key = ("pointwise backward", x.shape, x.stride(), None if y is None else y.stride(), dz.stride(), op, param)
    found: tuple[Tensor, Tensor | None] = written(key, _backward_body, (x, y, dz), op, param)
    return found


class Pointwise(torch.autograd.Function):
    """``f(x)`` or ``f(x) * y``; keeps its inputs."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor | None, op: int, param: float, dtype: torch.dtype | None
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, y)
        ctx.op, ctx.param = op, param
        return _run_forward(op, x, y, param, dtype)

    @staticmethod
    @once
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved_tensors
        with on_device(x):
            dx, dy = _run_backward(ctx.op, x, y, dz, ctx.param)
        return dx, dy, None, None, None


class PointwiseLinear(torch.autograd.Function):
    """``F.linear(f(x) * y, weight, bias)``; keeps ``x`` and ``y`` and not their product."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, op: int, param: float, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(x, y, weight)
        ctx.op, ctx.param, ctx.dtype = op, param, dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        z = pointwise_forward(op, x, y, param)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(z.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    @once
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, y, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        dx = dy = d_weight = d_bias = None
        with on_device(x), torch.autocast(x.device.type, enabled=False):
            flat = dout.reshape(-1, dout.shape[-1])
            if any(needs[:3]):
                dz = (dout @ weight.to(ctx.dtype)).to(x.dtype)
                dx, dy, z = pointwise_backward(ctx.op, x, y, dz, ctx.param, again=needs[2])
                if z is not None:
                    d_weight = (flat.t() @ z.to(ctx.dtype).view(-1, z.shape[-1])).to(weight.dtype)
            if needs[3]:
                d_bias = flat.sum(0).to(ctx.bias_dtype)
        return dx, dy, d_weight, d_bias, None, None, None


_pointwise, _pointwise_linear = applied(Pointwise), applied(PointwiseLinear)


def pointwise(
    op: int, x: Tensor, y: Tensor | None = None, param: float = 1.0, dtype: torch.dtype | None = None
) -> Tensor:
    """``f(x)``, or ``f(x) * y``, in ``dtype`` (that of ``x`` when None); differentiable."""
    with on_device(x):
        if torch.is_grad_enabled() and (x.requires_grad or (y is not None and y.requires_grad)):
            return _pointwise(x, y, op, param, dtype)
        return _run_forward(op, x, y, param, dtype)


def pointwise_linear(op: int, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, param: float = 1.0) -> Tensor:
    """``F.linear(f(x) * y, weight, bias)`` in the dtype of ``x`` or autocast's; differentiable."""
    with on_device(x):
        return _pointwise_linear(x, y, weight, bias, op, param, autocast_dtype(x))
