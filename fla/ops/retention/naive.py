# SPDX-License-Identifier: MIT
"""Retention written plainly: the reference of the tests."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["naive_retention"]


def naive_retention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Retention as attention, head-first.

    Args:
        q, k: ``[B, H, T, K]``; the scale is ``K ** -0.5``.
        v: ``[B, H, T, V]``.

    Returns:
        ``o`` ``[B, H, T, V]`` in the dtype of q.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    H, T, K = q.shape[1:]
    position = torch.arange(T, dtype=wide, device=q.device)
    distance = (position.unsqueeze(-1) - position).clamp(min=0)
    gamma = 1 - 2.0 ** (-5.0 - torch.arange(H, dtype=wide, device=q.device))
    decay = (gamma.view(-1, 1, 1) ** distance).tril()
    scores = q.to(wide) @ k.to(wide).mT * K**-0.5 * decay
    return (scores @ v.to(wide)).to(q.dtype)
