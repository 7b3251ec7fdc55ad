# SPDX-License-Identifier: MIT
"""Choosing by hand: pinning a backend, pinning core, registering at run time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fla import settings
from fla.backends.base import BaseBackend
from fla.backends.op import DispatchedOp
from fla.backends.plan import Pin
from fla.backends.registry import REGISTRY, Registration


@contextmanager
def use_backend(name: str, strict: bool = False) -> Iterator[None]:
    """Prefer one backend for a block, in this thread or task, over every switch and over its own ``slower``.

    ``"triton"`` and ``"torch"`` name core's own paths and leave plugins out. CPU tensors take Triton only here, and
    only under ``TRITON_INTERPRET=1``.

    Args:
        name: a ``backend_type``, ``"triton"`` or ``"torch"``.
        strict: never run anything else: a call that the backend does not take raises, and so does an op for which it
            is not registered, nested ones included.

    Raises:
        BackendUnavailable: at the call, under ``strict``; it has the reasons of every candidate.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"name must be a backend's name, got {name!r}")
    with settings.push({"pin": Pin(name, bool(strict))}):
        yield


@contextmanager
def reference_only() -> Iterator[None]:
    """Core without plugins for a block: no plugin, variable or setting can change that.

    A pin of a plugin inside the block is ignored or, when strict, an error at the call. Pins of core's paths hold.
    """
    with settings.push({"reference": True, "pin": None}):
        yield


def register(
    entry_point: str | Callable[..., Any],
    instance: BaseBackend | type[BaseBackend] | None = None,
    *,
    backend: type[BaseBackend] | None = None,
    verifier: Callable[..., Any] | None = None,
    env_var: str | None = None,
    override: bool = False,
) -> Any:
    """Register a backend at run time.

    ``register("kda", MyBackend())`` does so at once. Without ``instance`` the result is a decorator for a class or a
    function: ``@register(chunk_kda, backend=MyBase, verifier=check, env_var="FLA_MINE")``.

    Args:
        entry_point: an operation's name, or a dispatched function, which then is the only one taken over.
        instance: the backend (a class is called without arguments).
        backend: base class of a decorated function; for a decorated class, its ``backend_type`` must match.
        verifier: plain function without ``self``, kept on the instance.
        env_var: kept on the instance.
        override: replace a backend of the same type.

    Raises:
        KeyError: the function was never dispatched.
        DuplicateBackend, SignatureMismatch, ValueError, TypeError: nothing is registered.
    """
    if isinstance(entry_point, str):
        operation, functions = entry_point, None
    else:
        op = getattr(entry_point, "op", None)
        if not isinstance(op, DispatchedOp):
            raise KeyError(f"{entry_point!r} was never dispatched; decorate it with fla.backends.dispatch")
        operation, functions = op.key, frozenset({op.name})

    def add(row_backend: BaseBackend) -> None:
        if verifier is not None:
            row_backend.verifier = verifier
        if env_var is not None:
            row_backend.env_var = env_var
        REGISTRY.commit([Registration(operation, row_backend, functions=functions, override=override)])

    if instance is not None:
        if backend is not None:
            raise TypeError("give the backend as the second argument or as backend=, not both")
        add(instance() if isinstance(instance, type) else instance)
        return instance

    def decorate(target: Any) -> Any:
        if isinstance(target, type):
            made = target()
            if backend is not None and made.backend_type != backend.backend_type:
                raise ValueError(
                    f"{target.__name__}.backend_type is {made.backend_type!r}, backend={backend.__name__} "
                    f"has {backend.backend_type!r}"
                )
            add(made)
            return target
        if not callable(target):
            raise TypeError(f"register decorates a class or a function, got {target!r}")
        made = (backend or BaseBackend)()
        made.implementation = target
        if made.backend_type == BaseBackend.backend_type:
            # Functions without a base of their own must not replace each other.
            made.backend_type = f"{target.__module__}.{target.__qualname__}"
        add(made)
        return target

    return decorate
