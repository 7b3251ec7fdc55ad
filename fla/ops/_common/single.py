# SPDX-License-Identifier: MIT
"""Autograd functions at little cost: their call, and backward passes that are not differentiable themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

__all__ = ["applied", "once"]


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's ``once_differentiable``, whose bookkeeping is paid only where a second derivative could be asked for.

    A second derivative raises there also where the incoming gradients depend on nothing, as those of a sum: torch takes
    the results for constants then, and a penalty on gradients would lose its own without a word.
    """
    careful = once_differentiable(backward)

    def dependent(grad: Any) -> Any:
        constant = isinstance(grad, torch.Tensor) and not grad.requires_grad
        return grad.detach().requires_grad_() if constant else grad

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        return careful(ctx, *map(dependent, grads)) if torch.is_grad_enabled() else backward(ctx, *grads)

    return run


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` for positional arguments, without torch's layers in Python, which take half of its time.

    What they are for, functorch's transforms, goes through them: there a function without ``setup_context`` says so.
    """
    careful = function.apply
    direct = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active

    def apply(*args: Any) -> Any:
        return careful(*args) if transforms() else direct(*args)

    return apply
