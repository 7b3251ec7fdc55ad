# SPDX-License-Identifier: MIT
"""Norms written out, for tests."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["group_norm_ref", "layer_norm_ref", "rms_norm_ref"]

NormOutput = Tensor | tuple[Tensor, Tensor]


def group_norm_ref(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_groups: int,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    is_rms_norm: bool = False,
    prenorm: bool = False,
    upcast: bool = False,
) -> NormOutput:
    """The formula written out, in the dtype of ``x`` or, with ``upcast``, in float32. For tests."""
    dtype = x.dtype
    s, weight, bias = (None if t is None else t.float() if upcast else t for t in (x, weight, bias))
    assert s is not None
    if residual is not None:
        s = (s + (residual.float() if upcast else residual)).to(s.dtype)
    groups = s.unflatten(-1, (num_groups, -1))
    if not is_rms_norm:
        groups = groups - groups.mean(-1, keepdim=True)
    y = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    y = y if weight is None else y * weight
    y = (y if bias is None else y + bias).to(dtype)
    return (y, s.to(dtype)) if prenorm else y


def layer_norm_ref(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    upcast: bool = False,
) -> NormOutput:
    """Layer norm written out; see :func:`group_norm_ref`."""
    return group_norm_ref(x, weight, bias, 1, residual, eps, False, prenorm, upcast)


def rms_norm_ref(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    upcast: bool = False,
) -> NormOutput:
    """RMS norm written out; see :func:`group_norm_ref`."""
    return group_norm_ref(x, weight, bias, 1, residual, eps, True, prenorm, upcast)
