# SPDX-License-Identifier: MIT
"""The two passes of a norm by themselves, without autograd: what the low-level functions of 0.6.0 are made of."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fla.backends import CallFacts, dispatch
from fla.modules._checks import check_beside
from fla.modules._dtype import upcast
from fla.modules._norm.covers import covers_pass, covers_pass_back
from fla.ops._common.checks import ArgumentError

__all__ = ["norm_pass", "norm_pass_back"]

_FACTS = CallFacts(tensors=("x",), key="x", value="x", initial_state=None, state_v_first=None, cu_seqlens=None)
_BACK_FACTS = CallFacts(tensors=("s",), key="s", value="s", initial_state=None, state_v_first=None, cu_seqlens=None)

Optional = Tensor | None


def _gate(g: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The gate's function of ``g`` and its slope."""
    sig = torch.sigmoid(g)
    if activation == "sigmoid":
        return sig, sig * (1 - sig)
    return g * sig, sig * (1 + g * (1 - sig))


def _affine(n: Tensor, weight: Optional, bias: Optional) -> Tensor:
    n = n if weight is None else n * upcast(weight)
    return n if bias is None else n + upcast(bias)


def _check(x: Tensor, g: Optional, weight: Optional, bias: Optional, residual: Optional, num_groups: int) -> None:
    if x.dim() != 2 or num_groups < 1 or x.shape[1] % num_groups:
        raise ArgumentError(f"`x` must have shape [rows, D] with D a multiple of {num_groups}, got {list(x.shape)}.")
    for name, t in (("g", g), ("residual", residual)):
        if t is not None and t.shape != x.shape:
            raise ArgumentError(f"`{name}` must have the shape of `x`, {list(x.shape)}, got {list(t.shape)}.")
    for name, p in (("weight", weight), ("bias", bias)):
        if p is not None and p.numel() != x.shape[1]:
            raise ArgumentError(f"`{name}` must have {x.shape[1]} elements, got {list(p.shape)}.")
    check_beside(x, g=g, weight=weight, bias=bias, residual=residual)


@dispatch(
    "modules",
    facts=_FACTS,
    validate=_check,
    triton="fla.modules._norm.entry:norm_pass",
    triton_verifier=covers_pass,
    differentiable=False,
)
def norm_pass(
    x: Tensor,
    g: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    kind: str = "layer",
    activation: str = "swish",
    eps: float = 1e-5,
    num_groups: int = 1,
    out_dtype: torch.dtype | None = None,
    stream_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """``(y, stream, mean, rstd)`` of rows ``[rows, D]``; see :func:`fla.modules.norm.layernorm.group_norm`.

    Args:
        kind: ``"layer"``, ``"rms"`` or ``"l2"``.
        stream_dtype: dtype in which ``x + residual`` is returned; without it, None is.

    Returns:
        The statistics are float32 ``[rows * num_groups]``; ``mean`` is None unless ``kind`` is ``"layer"``.
    """
    s = upcast(x) if residual is None else upcast(x) + upcast(residual)
    u = s.reshape(-1, s.shape[-1] // num_groups)
    mean = None
    if kind == "layer":
        mean = u.mean(-1)
        u = u - mean[:, None]
    square = u.square()
    rstd = torch.rsqrt((square.sum(-1) if kind == "l2" else square.mean(-1)) + eps)
    y = _affine((u * rstd[:, None]).view_as(s), weight, bias)
    if g is not None:
        y = y * _gate(upcast(g), activation)[0]
    return y.to(out_dtype or x.dtype), None if stream_dtype is None else s.to(stream_dtype), mean, rstd


@dispatch(
    "modules",
    facts=_BACK_FACTS,
    triton="fla.modules._norm.entry:norm_pass_back",
    triton_verifier=covers_pass_back,
    differentiable=False,
)
def norm_pass_back(
    s: Tensor,
    dy: Tensor,
    ds: Tensor | None,
    g: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    kind: str = "layer",
    activation: str = "swish",
    num_groups: int = 1,
    x_dtype: torch.dtype | None = None,
    res_dtype: torch.dtype | None = None,
    again: bool = False,
    normalised: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients ``(dx, dresidual, dg, dweight, dbias)`` of :func:`norm_pass`, and its result once more.

    Args:
        s: what was normalised, ``x`` or the stream, or with ``normalised`` the result of that.
        ds: gradient of the stream.
        x_dtype: dtype of ``dx``; that of ``s`` if None.
        res_dtype: dtype of the residual's gradient; None for none.
        again: return the result of the forward pass in ``x_dtype``.
    """
    dtype = x_dtype or s.dtype
    W = s.shape[-1] // num_groups
    v = upcast(s).reshape(-1, W)
    r = rstd.to(v.dtype)[:, None]
    if not normalised:
        v = (v if mean is None else v - mean[:, None]) * r
    n = _affine(v.view_as(s), weight, bias)
    dn = upcast(dy)
    dg = None
    y = n
    if g is not None:
        value, slope = _gate(upcast(g), activation)
        dg = (dn * n * slope).to(g.dtype)
        dn = dn * value
        y = n * value
    dw = None if weight is None else (dn * v.view_as(s)).sum(0).to(weight.dtype)
    db = None if bias is None else dn.sum(0).to(bias.dtype)
    dn = (dn if weight is None else dn * upcast(weight)).reshape(-1, W)
    c = (dn * v).sum(-1, keepdim=True)
    du = dn - v * (c if kind == "l2" else c / W)
    if kind == "layer":
        du = du - dn.mean(-1, keepdim=True)
    dx = (du * r).view_as(s)
    if ds is not None:
        dx = dx + upcast(ds)
    dres = None if res_dtype is None else dx.to(res_dtype)
    return dx.to(dtype), dres, dg, dw, db, y.to(dtype) if again else None


def linear_pass_back(
    dout: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of ``F.linear(y, weight, bias)`` in the dtype of ``dout``; of parameters in theirs."""
    flat = dout.reshape(-1, dout.shape[-1])
    d_weight = (flat.t() @ y.to(dout.dtype).reshape(-1, y.shape[-1])).to(weight.dtype)
    return F.linear(flat, weight.to(dout.dtype).t()), d_weight, None if bias is None else flat.sum(0).to(bias.dtype)
