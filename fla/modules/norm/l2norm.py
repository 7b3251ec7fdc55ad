# SPDX-License-Identifier: MIT
"""L2 normalisation of rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fla.backends import dispatch
from fla.modules._dtype import upcast
from fla.modules._facts import ROWS
from fla.modules._norm.covers import covers_l2norm
from fla.modules.norm.functions import L2NormFunction, l2norm_bwd, l2norm_fwd

__all__ = ["L2Norm", "L2NormFunction", "l2_norm", "l2norm", "l2norm_bwd", "l2norm_fwd"]


@dispatch("modules", facts=ROWS, triton="fla.modules._norm.entry:l2norm", triton_verifier=covers_l2norm)
def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """``x / sqrt(sum(x ** 2) + eps)`` over the last axis, computed in float32.

    Args:
        x: ``[..., D]``.
        eps: added under the root, unlike ``F.normalize``.
        output_dtype: dtype of the result; that of ``x`` when None.
    """
    u = upcast(x)
    return (u * torch.rsqrt(u.square().sum(-1, keepdim=True) + eps)).to(output_dtype or x.dtype)


l2_norm = l2norm


class L2Norm(nn.Module):
    """:func:`l2norm` as a module without parameters."""

    def __init__(self, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.output_dtype = output_dtype

    def forward(self, x: Tensor) -> Tensor:
        """``[..., D] -> [..., D]``."""
        return l2norm(x, self.eps, self.output_dtype)
