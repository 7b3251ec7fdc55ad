# SPDX-License-Identifier: MIT
"""Decorators for functions that launch kernels."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any, TypeVar, overload

import torch

from fla.utils import facts

F = TypeVar("F", bound=Callable[..., Any])


def _device_of(tensor: torch.Tensor | None) -> contextlib.AbstractContextManager[Any]:
    # Its own device type, not the host's: a CPU tensor on a GPU host needs no switch.
    if tensor is None or tensor.device.type in ("cpu", "meta") or tensor.device.index is None:
        return contextlib.nullcontext()
    library: Any = getattr(torch, tensor.device.type, None)
    if not hasattr(library, "device"):
        return contextlib.nullcontext()
    return library.device(tensor.device.index)


@overload
def input_guard(fn: F, *, no_guard_contiguous: bool | Collection[str] = ...) -> F: ...
@overload
def input_guard(fn: None = None, *, no_guard_contiguous: bool | Collection[str] = ...) -> Callable[[F], F]: ...
def input_guard(fn: F | None = None, *, no_guard_contiguous: bool | Collection[str] = False) -> F | Callable[[F], F]:
    """Tensor arguments arrive contiguous, and their device is the current one.

    The device is that of the first tensor, positional arguments before keywords. Tensors inside of tuples and lists are
    passed on as they are.

    Args:
        no_guard_contiguous: True passes every tensor on as it is, names those parameters.

    Raises:
        ValueError: `no_guard_contiguous` names something that is no parameter of the function (when decorating).
    """
    if fn is None:
        return functools.partial(input_guard, no_guard_contiguous=no_guard_contiguous)
    if isinstance(no_guard_contiguous, str):
        no_guard_contiguous = (no_guard_contiguous,)
    all_free = no_guard_contiguous is True
    free = frozenset() if isinstance(no_guard_contiguous, bool) else frozenset(no_guard_contiguous)
    parameters = inspect.signature(fn).parameters
    takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if free - set(parameters) and not takes_more:
        unknown = ", ".join(sorted(free - set(parameters)))
        raise ValueError(f"no_guard_contiguous names {unknown}; parameters are {', '.join(parameters)}")
    free_places = frozenset(i for i, name in enumerate(parameters) if name in free)

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        first = None
        for a in (*args, *kwargs.values()):  # a loop, as older Dynamos cannot trace next() with a default
            if isinstance(a, torch.Tensor):
                first = a
                break
        if not all_free:
            args = tuple(
                a.contiguous() if isinstance(a, torch.Tensor) and i not in free_places else a
                for i, a in enumerate(args)
            )
            kwargs = {
                n: a.contiguous() if isinstance(a, torch.Tensor) and n not in free else a for n, a in kwargs.items()
            }
        with _device_of(first):
            return fn(*args, **kwargs)

    return wrapper


def contiguous(fn: F) -> F:
    """`input_guard` with nothing left out."""
    return input_guard(fn)


def autocast_custom_fwd(fwd: F | None = None, *, cast_inputs: torch.dtype | None = None) -> Any:
    """`torch.amp.custom_fwd` for this host's device type."""
    return torch.amp.custom_fwd(fwd, device_type=facts.device(), cast_inputs=cast_inputs)


def autocast_custom_bwd(bwd: F | None = None) -> Any:
    """`torch.amp.custom_bwd` for this host's device type."""
    return torch.amp.custom_bwd(bwd, device_type=facts.device())


def checkpoint(fn: F) -> F:
    """Activations inside of `fn` are dropped after the forward and computed again in the backward.

    The non-reentrant form of `torch.utils.checkpoint`: keyword arguments work, and inputs need no gradient.
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        from torch.utils.checkpoint import checkpoint as recompute

        return recompute(fn, *args, use_reentrant=False, **kwargs)

    return wrapper  # type: ignore[return-value]
