# SPDX-License-Identifier: MIT
"""Which backends are registered for which operation. Changes are transactions: all of one, or nothing."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fla import settings
from fla.backends.base import BaseBackend, own_switch
from fla.backends.errors import DuplicateBackend

if TYPE_CHECKING:
    from fla.backends.op import DispatchedOp


@dataclass(frozen=True, eq=False)
class Registration:
    """One backend for one operation. ``functions`` restricts it; ``plugin`` is None for a registration at run time."""

    operation: str
    backend: BaseBackend
    plugin: str | None = None
    distribution: str | None = None
    functions: frozenset[str] | None = None
    override: bool = False

    @property
    def name(self) -> str:
        return self.backend.backend_type

    @property
    def order(self) -> tuple[int, str, str]:
        return (self.backend.priority, self.name, self.distribution or "")

    @property
    def source(self) -> str:
        return self.distribution or "a registration at run time"


class Registry:
    """The registrations of the process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._rows: dict[str, tuple[Registration, ...]] = {}
        self._ops: dict[str, weakref.WeakSet[DispatchedOp]] = {}

    def of(self, operation: str) -> tuple[Registration, ...]:
        """Registrations of an operation by (priority, name, distribution)."""
        return self._rows.get(operation, ())

    def operations(self) -> tuple[str, ...]:
        return tuple(sorted({*self._rows, *self._ops}))

    def ops(self, operation: str | None = None) -> list[DispatchedOp]:
        """The dispatched functions of an operation, or all."""
        with self.lock:
            sets = [self._ops.get(operation, ())] if operation is not None else list(self._ops.values())
            return sorted((op for ops in sets for op in ops), key=lambda op: (op.operation, op.name))

    def add_op(self, op: DispatchedOp) -> None:
        with self.lock:
            self._ops.setdefault(op.key, weakref.WeakSet()).add(op)

    def snapshot(self) -> dict[str, tuple[Registration, ...]]:
        return dict(self._rows)

    def commit(self, added: Iterable[Registration]) -> None:
        """Take all of ``added``.

        Raises:
            SignatureMismatch, DuplicateBackend, TypeError: one of them does not fit; the registry is as it was.
        """
        with self.lock:
            rows = dict(self._rows)
            added = list(added)
            for row in added:
                _check_backend(row.backend)
                for op in self.ops(row.operation):
                    op.check(row)
                rows[row.operation] = _merged(rows.get(row.operation, ()), row)
            self._rows = rows
            for row in added:
                own_switch(row.backend)
            self.invalidate()

    def remove(self, doomed: Iterable[Registration]) -> None:
        """Drop registrations."""
        with self.lock:
            gone = set(map(id, doomed))
            kept = {name: tuple(r for r in rows if id(r) not in gone) for name, rows in self._rows.items()}
            self._rows = {name: rows for name, rows in kept.items() if rows}
            self.invalidate()

    def invalidate(self) -> None:
        """Drop every plan."""
        with self.lock:
            for ops in self._ops.values():
                for op in ops:
                    op.invalidate()


def _merged(rows: tuple[Registration, ...], row: Registration) -> tuple[Registration, ...]:
    """``rows`` with ``row``, by order. Of two of one type the one that says ``override`` stays."""
    same = [r for r in rows if r.name == row.name and _overlap(r, row)]
    overrides = row.override or row.backend.override
    for other in same:
        others = other.override or other.backend.override
        if overrides == others:
            raise DuplicateBackend(
                f"backend {row.name!r} of operation {row.operation!r} is registered by {other.source} and again by "
                f"{row.source}; uninstall one, keep one out with FLA_PLUGINS, or let one say override=True"
            )
    if same and not overrides:
        return rows
    return tuple(sorted((*(r for r in rows if r not in same), row), key=lambda r: r.order))


def _overlap(a: Registration, b: Registration) -> bool:
    return a.functions is None or b.functions is None or bool(a.functions & b.functions)


def _check_backend(backend: Any) -> None:
    if not isinstance(backend, BaseBackend):
        raise TypeError(f"a backend must be an instance of BaseBackend, got {backend!r}")
    if not isinstance(backend.backend_type, str) or not backend.backend_type:
        raise TypeError(f"{type(backend).__name__}.backend_type must be a name, got {backend.backend_type!r}")
    if backend.backend_type in ("triton", "torch"):
        raise TypeError(f"{type(backend).__name__}.backend_type {backend.backend_type!r} is the name of a core path")
    if isinstance(backend.priority, bool) or not isinstance(backend.priority, int):
        raise TypeError(f"{type(backend).__name__}.priority must be an integer, got {backend.priority!r}")
    # What is wrong here would otherwise come up inside the calls of users.
    requires, variable, capability = backend.requires, backend.env_var, backend.capability
    if not isinstance(requires, str | tuple | list) or not all(isinstance(text, str) for text in requires):
        raise TypeError(f"{type(backend).__name__}.requires must be a tuple of requirements, got {requires!r}")
    if capability is not None and not callable(getattr(capability, "check", None)):
        raise TypeError(f"{type(backend).__name__}.capability must be a Capability, got {capability!r}")
    if variable is not None:
        if not isinstance(variable, str) or not variable or "=" in variable:
            raise TypeError(f"{type(backend).__name__}.env_var must be the name of a variable, got {variable!r}")
        if settings.is_core(variable):
            raise TypeError(f"{type(backend).__name__}.env_var {variable} is a setting of core")


REGISTRY = Registry()
settings.on_change(REGISTRY.invalidate)


class Registrar:
    """What a plugin's hook is given: registrations are collected and taken together when the hook returns."""

    def __init__(self, plugin: str | None = None, distribution: str | None = None) -> None:
        self.plugin, self.distribution = plugin, distribution
        self.rows: list[Registration] = []

    def register(self, operation: str, backend: BaseBackend | type[BaseBackend], *, override: bool = False) -> None:
        """Offer ``backend`` (an instance, or a class to be called without arguments) for ``operation``."""
        if not isinstance(operation, str) or not operation:
            raise TypeError(f"operation must be a name such as 'kda', got {operation!r}")
        instance = backend() if isinstance(backend, type) else backend
        _check_backend(instance)
        self.rows.append(Registration(operation, instance, self.plugin, self.distribution, None, override))


class BackendRegistry:
    """View of one operation. Making it anew gives the same backends."""

    def __init__(self, operation_name: str) -> None:
        self.operation_name = operation_name

    def __repr__(self) -> str:
        return (
            f"BackendRegistry({self.operation_name!r}): {', '.join(b.backend_type for b in self.backends) or 'empty'}"
        )

    @property
    def backends(self) -> tuple[BaseBackend, ...]:
        """Registered backends in the order in which they are asked."""
        return tuple(row.backend for row in REGISTRY.of(self.operation_name))

    def register(self, backend: BaseBackend | type[BaseBackend], *, override: bool = False) -> None:
        """Register at once."""
        registrar = Registrar()
        registrar.register(self.operation_name, backend, override=override)
        REGISTRY.commit(registrar.rows)

    def unregister(self, backend: BaseBackend | str) -> None:
        """Drop a backend, given itself or its type. Unknown: KeyError."""
        rows = [r for r in REGISTRY.of(self.operation_name) if backend in (r.backend, r.name)]
        if not rows:
            raise KeyError(f"no backend {backend!r} is registered for operation {self.operation_name!r}")
        REGISTRY.remove(rows)

    def get_active(self) -> BaseBackend | None:
        """The first backend that is available and enabled now; verifiers are not asked."""
        from fla.backends import switches

        for row in REGISTRY.of(self.operation_name):
            if switches.standing(row)[0] is None:
                return row.backend
        return None
