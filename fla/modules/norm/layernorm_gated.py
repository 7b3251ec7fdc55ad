# SPDX-License-Identifier: MIT
"""Grouped norm with a SiLU gate before or after it, as Mamba-2 uses (https://arxiv.org/abs/2405.21060)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fla.backends import dispatch
from fla.modules._checks import check_beside
from fla.modules._dtype import upcast
from fla.modules._facts import ROWS
from fla.modules._norm.covers import covers_group_gated
from fla.modules.norm.layernorm import NormBase, check_rows, normalize
from fla.ops._common.checks import ArgumentError

__all__ = [
    "LayerNormGated",
    "RMSNormGated",
    "layer_norm_bwd",
    "layer_norm_fwd",
    "layernorm_fn",
    "rms_norm_ref",
    "rmsnorm_fn",
]


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor | None, group_size: int | None) -> None:
    check_rows(x, weight, bias, None)
    if group_size is not None and (group_size < 1 or x.shape[-1] % group_size):
        raise ArgumentError(f"`group_size` must divide the {x.shape[-1]} channels of `x`, got {group_size}.")
    if z is not None and z.shape != x.shape:
        raise ArgumentError(f"`z` must have the shape of `x`, {list(x.shape)}, got {list(z.shape)}.")
    check_beside(x, z=z)


@dispatch(
    "modules",
    facts=ROWS,
    validate=_check,
    triton="fla.modules._norm.entry:layernorm_fn",
    triton_verifier=covers_group_gated,
)
def layernorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> Tensor:
    """``norm(x) * silu(z)`` or, with ``norm_before_gate=False``, ``norm(x * silu(z))``.

    Args:
        x, z: ``[..., D]``; without ``z`` there is no gate.
        weight, bias: ``[D]``.
        eps: added to the variance.
        group_size: channels normalised together; all of them when None.

    Raises:
        ArgumentError: shapes that do not fit.
    """
    groups = 1 if group_size is None else x.shape[-1] // group_size
    gate = None if z is None else F.silu(upcast(z))
    s = upcast(x)
    if gate is not None and not norm_before_gate:
        s = s * gate
    y = normalize(s, weight, bias, eps, is_rms_norm, groups)
    if gate is not None and norm_before_gate:
        y = y * gate
    return y.to(x.dtype)


def rmsnorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    """:func:`layernorm_fn` without centring."""
    return layernorm_fn(x, weight, bias, z, eps, group_size, norm_before_gate, True)


def layer_norm_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    z: Tensor | None = None,
    out: Tensor | None = None,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """:func:`layernorm_fn` of ``x`` ``[M, D]`` without autograd: ``(y, mean, rstd)``.

    Args:
        out: where ``y`` is written.

    Returns:
        The statistics are float32 ``[G * M]``, group by group; ``mean`` is None with ``is_rms_norm``.
    """
    with torch.no_grad():
        y = layernorm_fn(x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm)
        s = upcast(x)
        if z is not None and not norm_before_gate:
            s = s * F.silu(upcast(z))
        groups = s.unflatten(-1, (-1, group_size or s.shape[-1]))
        mean = None if is_rms_norm else groups.mean(-1)
        centred = groups if mean is None else groups - mean[..., None]
        rstd = torch.rsqrt(centred.square().mean(-1) + eps)
        y = y if out is None else out.copy_(y)
    return y, None if mean is None else mean.t().flatten(), rstd.t().flatten()


def layer_norm_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    mean: Tensor | None,
    rstd: Tensor | None,
    z: Tensor | None = None,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    recompute_output: bool = False,
    dz: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Backward of :func:`layer_norm_fwd`: ``(dx, dweight, dbias, dz)`` and, with ``recompute_output``, ``y``.

    Args:
        mean, rstd: accepted and not needed, statistics are computed again.
        dz, out: where the gradient of ``z`` and ``y`` are written.
    """
    leaves = [None if t is None else t.detach().requires_grad_() for t in (x, weight, bias, z)]
    with torch.enable_grad():
        y = layernorm_fn(*leaves, eps, group_size, norm_before_gate, is_rms_norm)  # type: ignore[arg-type, call-arg]
    found = iter(torch.autograd.grad(y, [t for t in leaves if t is not None], dy))
    dx, dw, db, dgate = (None if t is None else next(found) for t in leaves)
    if dz is not None and dgate is not None:
        dgate = dz.copy_(dgate)
    if not recompute_output:
        return dx, dw, db, dgate
    return dx, dw, db, dgate, y.detach() if out is None else out.copy_(y.detach())


def rms_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    upcast: bool = True,
) -> Tensor:
    """The formula written out, in float32 with ``upcast``. For tests."""
    dtype = x.dtype
    s, gate = x, z
    if upcast:
        s, weight, gate = x.float(), weight.float(), None if z is None else z.float()
    if gate is not None and not norm_before_gate:
        s = s * F.silu(gate)
    groups = s.unflatten(-1, (-1, group_size or s.shape[-1]))
    y = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(-2) * weight
    y = y if bias is None else y + bias
    if gate is not None and norm_before_gate:
        y = y * F.silu(gate)
    return y.to(dtype)


class LayerNormGated(NormBase):
    """:func:`layernorm_fn` with parameters ``weight`` and ``bias``."""

    is_rms_norm = False

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, True, not self.is_rms_norm, eps, device, dtype)
        self.group_size = group_size
        self.norm_before_gate = norm_before_gate

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """``x`` and ``z`` ``[..., hidden_size]``."""
        return layernorm_fn(
            x, self.weight, self.bias, z, self.eps, self.group_size, self.norm_before_gate, self.is_rms_norm
        )


class RMSNormGated(LayerNormGated):
    """:func:`rmsnorm_fn` with a ``weight``; by default the gate comes before the norm."""

    is_rms_norm = True

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, group_size, norm_before_gate, device, dtype)
