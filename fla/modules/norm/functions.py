# SPDX-License-Identifier: MIT
"""Low-level functions and autograd classes of 0.6.0, for code that calls them directly.

The functions of :mod:`fla.modules.norm` do not go through here: they keep less for the backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fla.modules._dtype import autocast_dtype
from fla.modules.norm.passes import linear_pass_back, norm_pass, norm_pass_back
from fla.ops._common.checks import ArgumentError
from fla.ops._common.single import once, probes

__all__ = [
    "L2NormFunction",
    "LayerNormFunction",
    "LayerNormGatedFunction",
    "LayerNormGatedLinearFunction",
    "LayerNormLinearFunction",
    "l2norm_bwd",
    "l2norm_fwd",
    "layer_norm_bwd",
    "layer_norm_fwd",
    "layer_norm_gated_bwd",
    "layer_norm_gated_fwd",
]


def _kind(is_rms_norm: bool) -> str:
    return "rms" if is_rms_norm else "layer"


def _like(t: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    return None if t is None else t.reshape(shape)


def _stream_dtype(x: Tensor, residual: Tensor | None, wanted: torch.dtype | None) -> torch.dtype | None:
    if residual is not None:
        return wanted or residual.dtype
    return None if wanted in (None, x.dtype) else wanted


def _forward(
    x: Tensor, g: Tensor | None, weight: Tensor | None, bias: Tensor | None, activation: str, eps: float,
    residual: Tensor | None, out_dtype: torch.dtype | None, residual_dtype: torch.dtype | None, rms: bool, groups: int,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:  # fmt: skip
    """``(y, mean, rstd, stream)`` of ``[rows * groups, D / groups]``."""
    rows = x.reshape(-1, x.shape[-1] * groups)
    g, residual = _like(g, rows.shape), _like(residual, rows.shape)
    wanted = _stream_dtype(x, residual, residual_dtype)
    kind = _kind(rms)
    y, stream, mean, rstd = norm_pass(
        rows, g, weight, bias, residual, kind, activation, eps, groups, out_dtype, wanted
    )  # fmt: skip
    return y.view(x.shape), mean, rstd, x if stream is None else stream.view(x.shape)


def _backward(
    dy: Tensor, x: Tensor, g: Tensor | None, weight: Tensor | None, bias: Tensor | None, activation: str,
    mean: Tensor | None, rstd: Tensor | None, dres: Tensor | None, has_residual: bool, rms: bool,
    x_dtype: torch.dtype | None, again: bool, groups: int,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """``(dx, dg, dweight, dbias, dresidual, y)``."""
    if rstd is None or (mean is None and not rms):
        raise ArgumentError("`rstd`, and `mean` unless `is_rms_norm`, must be given, got None.")
    rows = x.reshape(-1, x.shape[-1] * groups)
    dx, dresidual, dg, dw, db, y = norm_pass_back(
        rows, dy.reshape(rows.shape), _like(dres, rows.shape), _like(g, rows.shape), weight, bias, mean, rstd,
        _kind(rms), activation, groups, x_dtype, x.dtype if has_residual else None, again,
    )  # fmt: skip
    shape = x.shape
    return dx.view(shape), _like(dg, shape), dw, db, _like(dresidual, shape), _like(y, shape)


def layer_norm_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Forward of a norm: ``(y, mean, rstd, residual stream)``.

    Args:
        x, residual: ``[rows * num_groups, D / num_groups]``.
        weight, bias: ``[D]`` or None.
        out_dtype: dtype of ``y``; that of ``x`` when None.
        residual_dtype: dtype of the stream; that of the residual, or of ``x`` without one, when None.
    """
    return _forward(
        x, None, weight, bias, "swish", eps, residual, out_dtype, residual_dtype, is_rms_norm, num_groups
    )  # fmt: skip


def layer_norm_gated_fwd(
    x: Tensor,
    g: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    eps: float = 1e-5,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    is_rms_norm: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """:func:`layer_norm_fwd` with an output gate ``g`` like ``x`` (without one when None)."""
    return _forward(x, g, weight, bias, activation, eps, residual, out_dtype, residual_dtype, is_rms_norm, 1)


def layer_norm_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    dres: Tensor | None = None,
    has_residual: bool = False,
    is_rms_norm: bool = False,
    x_dtype: torch.dtype | None = None,
    recompute_output: bool = False,
    num_groups: int = 1,
) -> tuple[Any, ...]:
    """Backward of :func:`layer_norm_fwd`: ``(dx, dweight, dbias, dresidual)`` and, with ``recompute_output``, ``y``.

    Args:
        dy: gradient of ``y``.
        x: what was normalised, the residual stream where there was a residual.
        mean, rstd: statistics from the forward; ``rstd`` is required, ``mean`` too unless ``is_rms_norm``.
        dres: gradient of the stream, included in ``dx``.
        has_residual: whether to return ``dresidual``, in the dtype of ``x``; else it is None.
        x_dtype: dtype of ``dx``; that of ``x`` when None.
    """
    dx, _, dw, db, dresidual, y = _backward(
        dy, x, None, weight, bias, "swish", mean, rstd, dres, has_residual, is_rms_norm, x_dtype, recompute_output,
        num_groups,
    )  # fmt: skip
    return (dx, dw, db, dresidual, y) if recompute_output else (dx, dw, db, dresidual)


def layer_norm_gated_bwd(
    dy: Tensor,
    x: Tensor,
    g: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    eps: float = 1e-5,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    dresidual: Tensor | None = None,
    has_residual: bool = False,
    is_rms_norm: bool = False,
    x_dtype: torch.dtype | None = None,
    recompute_output: bool = False,
) -> tuple[Any, ...]:
    """Backward of :func:`layer_norm_gated_fwd`: ``(dx, dg, dweight, dbias, dresidual)`` and, with
    ``recompute_output``, ``y``; arguments as for :func:`layer_norm_bwd`."""
    out = _backward(
        dy, x, g, weight, bias, activation, mean, rstd, dresidual, has_residual, is_rms_norm, x_dtype,
        recompute_output, 1,
    )  # fmt: skip
    return out if recompute_output else out[:5]


def l2norm_fwd(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """``(y, rstd)`` of the L2 norm of ``x`` ``[..., D]``; ``rstd`` is float32 ``[...]``."""
    y, _, _, rstd = norm_pass(x.reshape(-1, x.shape[-1]), None, None, None, None, "l2", "swish", eps, 1, output_dtype)
    return y.view(x.shape), rstd.view(x.shape[:-1])


def l2norm_bwd(y: Tensor, rstd: Tensor, dy: Tensor, eps: float = 1e-6) -> Tensor:
    """Gradient of ``x`` from the results of :func:`l2norm_fwd`, in the dtype of ``y``."""
    rows = y.reshape(-1, y.shape[-1])
    dy = dy.reshape(rows.shape)
    dx = norm_pass_back(rows, dy, None, None, None, None, None, rstd.reshape(-1), "l2", normalised=True)[0]
    return dx.view(y.shape)


class L2NormFunction(torch.autograd.Function):
    """Autograd of the L2 norm: ``apply(x, eps, output_dtype)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
        y, rstd = l2norm_fwd(x, eps, output_dtype)
        ctx.save_for_backward(y, rstd)
        ctx.dtype = x.dtype
        return y

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        y, rstd = ctx.saved_tensors
        return l2norm_bwd(y, rstd, dy).to(ctx.dtype), None, None


def _run(
    ctx: Any, x: Tensor, g: Tensor | None, w: Tensor | None, b: Tensor | None, activation: str,
    residual: Tensor | None, eps: float, prenorm: bool, in_fp32: bool, rms: bool, groups: int,
    linear: tuple[Tensor, Tensor | None] | None,
) -> Any:  # fmt: skip
    """Forward of all the norm classes below."""
    size = (-1, x.shape[-1] // groups)
    wanted = torch.float32 if in_fp32 and residual is None else None
    y, mean, rstd, stream = _forward(
        x.reshape(size), g, w, b, activation, eps, residual, None, wanted, rms, groups
    )  # fmt: skip
    out = y.view(x.shape)
    dtype = autocast_dtype(x)
    if linear is not None:
        weight, bias = linear
        with torch.autocast(x.device.type, enabled=False):
            out = F.linear(out.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    ctx.save_for_backward(stream, g, w, b, mean, rstd, *(linear or ()))
    ctx.rule = activation, rms, groups, residual is not None, x.dtype, dtype, linear is not None
    ctx.probes = probes(x, residual)
    ctx.set_materialize_grads(False)
    if not prenorm:
        return out
    # An input that is returned as it is would lose its place in the graph.
    return out, (x.clone() if stream.data_ptr() == x.data_ptr() else stream.view(x.shape))


def _run_back(ctx: Any, dout: Tensor | None, dstream: Tensor | None) -> tuple[Any, ...]:
    """``(dx, dg, dw, db, dresidual, dweight of the linear layer, dbias of it)``."""
    stream, g, w, b, mean, rstd, *linear = ctx.saved_tensors
    activation, rms, groups, has_residual, x_dtype, dtype, is_linear = ctx.rule
    if dout is None and dstream is None:
        return (None,) * 7
    d_weight = d_bias = None
    if dout is None:
        dy, is_linear = torch.zeros_like(stream, dtype=x_dtype), False
    else:
        with torch.autocast(stream.device.type, enabled=False):
            dy = F.linear(dout, linear[0].to(dtype).t()).to(x_dtype) if is_linear else dout
    dx, dg, dw, db, dres, y = _backward(
        dy, stream, g, w, b, activation, mean, rstd, dstream, has_residual, rms, x_dtype, is_linear, groups
    )  # fmt: skip
    if is_linear:
        assert dout is not None
        assert y is not None
        shape = (*dout.shape[:-1], linear[0].shape[1])
        with torch.autocast(stream.device.type, enabled=False):
            _, d_weight, d_bias = linear_pass_back(dout, y.view(shape), linear[0], linear[1])
    return dx, dg, dw, db, dres, d_weight, d_bias


class LayerNormFunction(torch.autograd.Function):
    """Autograd of layer, RMS and group norm; ``apply`` takes positional arguments."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None = None,
        eps: float = 1e-5,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
        is_rms_norm: bool = False,
        num_groups: int = 1,
    ) -> Any:
        ctx.shape = x.shape
        return _run(
            ctx, x, None, weight, bias, "swish", residual, eps, prenorm, residual_in_fp32, is_rms_norm, num_groups, None
        )  # fmt: skip

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor | None, dstream: Tensor | None = None) -> tuple[Any, ...]:
        dx, _, dw, db, dres, _, _ = _run_back(ctx, dy, dstream)
        return _like(dx, ctx.shape), dw, db, _like(dres, ctx.shape), None, None, None, None, None


class LayerNormLinearFunction(torch.autograd.Function):
    """:class:`LayerNormFunction` followed by a linear layer."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        residual: Tensor | None = None,
        eps: float = 1e-5,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
        is_rms_norm: bool = False,
        num_groups: int = 1,
    ) -> Any:
        ctx.shape = x.shape
        linear = linear_weight, linear_bias
        return _run(
            ctx, x, None, norm_weight, norm_bias, "swish", residual, eps, prenorm, residual_in_fp32, is_rms_norm,
            num_groups, linear,
        )  # fmt: skip

    @staticmethod
    @once
    def backward(ctx: Any, dout: Tensor | None, dstream: Tensor | None = None) -> tuple[Any, ...]:
        dx, _, dw, db, dres, d_weight, d_bias = _run_back(ctx, dout, dstream)
        dx, dres = _like(dx, ctx.shape), _like(dres, ctx.shape)
        return dx, dw, db, d_weight, d_bias, dres, None, None, None, None, None


class LayerNormGatedFunction(torch.autograd.Function):
    """Autograd of the gated norms."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        g: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        activation: str,
        residual: Tensor | None = None,
        eps: float = 1e-6,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
        is_rms_norm: bool = False,
    ) -> Any:
        ctx.shape = x.shape
        return _run(
            ctx, x, g, weight, bias, activation, residual, eps, prenorm, residual_in_fp32, is_rms_norm, 1, None
        )  # fmt: skip

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor | None, dstream: Tensor | None = None) -> tuple[Any, ...]:
        dx, dg, dw, db, dres, _, _ = _run_back(ctx, dy, dstream)
        dx, dg, dres = (_like(t, ctx.shape) for t in (dx, dg, dres))
        return dx, dg, dw, db, None, dres, None, None, None, None


class LayerNormGatedLinearFunction(torch.autograd.Function):
    """Autograd of the gated norms followed by a linear layer; the gate is swish."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        g: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        residual: Tensor | None = None,
        eps: float = 1e-6,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
        is_rms_norm: bool = False,
    ) -> Any:
        ctx.shape = x.shape
        linear = linear_weight, linear_bias
        return _run(
            ctx, x, g, norm_weight, norm_bias, "swish", residual, eps, prenorm, residual_in_fp32, is_rms_norm, 1, linear
        )  # fmt: skip

    @staticmethod
    @once
    def backward(ctx: Any, dout: Tensor | None, dstream: Tensor | None = None) -> tuple[Any, ...]:
        dx, dg, dw, db, dres, d_weight, d_bias = _run_back(ctx, dout, dstream)
        dx, dg, dres = (_like(t, ctx.shape) for t in (dx, dg, dres))
        return dx, dg, dw, db, d_weight, d_bias, dres, None, None, None, None, None
