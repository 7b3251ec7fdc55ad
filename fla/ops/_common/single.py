# SPDX-License-Identifier: MIT
"""Backward passes that are not differentiable themselves, at little cost."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

__all__ = ["once"]


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's ``once_differentiable``, whose bookkeeping is paid only where a second derivative could be asked for."""
    careful = once_differentiable(backward)

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        return careful(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return run
