# SPDX-License-Identifier: MIT
"""Which calls the norm kernels cover. Needs no triton; the rest of a call runs in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from fla.modules._covers import DTYPES, WRONG_DTYPE, Answer, covers_plain
from fla.modules._norm.policy import MAX_WIDTH

_WIDE: Answer = (False, f"the Triton kernels normalise up to {MAX_WIDTH} channels at a time")


def covers_l2norm(x: Tensor, output_dtype: torch.dtype | None) -> Answer:
    """Verifier of the L2 norm."""
    if output_dtype is not None and output_dtype not in DTYPES:
        return WRONG_DTYPE
    return covers_norm(x, None, None, None)


def covers_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> Answer:
    """Verifier of norms."""
    return covers_plain(x, weight, bias, residual) if x.shape[-1] <= MAX_WIDTH else _WIDE


def covers_groups(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, num_groups: int
) -> Answer:
    """Verifier of the group norm."""
    return covers_plain(x, weight, bias, residual) if x.shape[-1] <= MAX_WIDTH * num_groups else _WIDE


def covers_gated(x: Tensor, g: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> Answer:
    """Verifier of gated norms."""
    return covers_plain(x, g, weight, bias, residual) if x.shape[-1] <= MAX_WIDTH else _WIDE


def covers_group_gated(
    x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor | None, group_size: int | None
) -> Answer:
    """Verifier of the grouped gated norm."""
    return covers_plain(x, z, weight, bias) if (group_size or x.shape[-1]) <= MAX_WIDTH else _WIDE


def covers_linear(
    x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, linear_weight: Tensor,
    linear_bias: Tensor | None, residual: Tensor | None, num_groups: int,
) -> Answer:  # fmt: skip
    """Verifier of a norm followed by a linear layer."""
    if x.shape[-1] > MAX_WIDTH * num_groups:
        return _WIDE
    return covers_plain(x, norm_weight, norm_bias, linear_weight, linear_bias, residual)


def covers_gated_linear(
    x: Tensor, g: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, linear_weight: Tensor,
    linear_bias: Tensor | None, residual: Tensor | None,
) -> Answer:  # fmt: skip
    """Verifier of a gated norm followed by a linear layer."""
    if x.shape[-1] > MAX_WIDTH:
        return _WIDE
    return covers_plain(x, g, norm_weight, norm_bias, linear_weight, linear_bias, residual)


def covers_pass(
    x: Tensor, g: Tensor | None, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, num_groups: int
) -> Answer:
    """Verifier of a forward pass by itself."""
    return covers_plain(x, g, weight, bias, residual) if x.shape[-1] <= MAX_WIDTH * num_groups else _WIDE


def covers_pass_back(
    s: Tensor, dy: Tensor, ds: Tensor | None, g: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    num_groups: int,
) -> Answer:  # fmt: skip
    """Verifier of a backward pass by itself."""
    return covers_plain(s, dy, ds, g, weight, bias) if s.shape[-1] <= MAX_WIDTH * num_groups else _WIDE
