# SPDX-License-Identifier: MIT
"""Finding installed plugins and taking each through its stages. One that fails is kept for display and passed over."""

from __future__ import annotations

import importlib
import os
import threading
import time
import traceback
from dataclasses import dataclass
from typing import Any

import pluggy

from fla import settings
from fla.backends import switches
from fla.backends._spec import API_VERSION, PROJECT, Hooks
from fla.backends.base import BaseBackend
from fla.backends.errors import PluginError
from fla.backends.registry import REGISTRY, Registrar

GROUP = "fla.backends"


@dataclass(eq=False)
class Plugin:
    """One entry point of group ``fla.backends``, or a built-in of core.

    ``state`` is how far it came: found, blocked, imported, registered, probed. With ``error`` set it stopped there;
    ``reason`` says why in one line.
    """

    name: str
    value: str
    distribution: str | None = None
    version: str | None = None
    builtin: bool = False
    state: str = "found"
    reason: str | None = None
    error: str | None = None
    load_ms: float | None = None
    file: str | None = None
    registered: tuple[tuple[str, BaseBackend], ...] = ()

    @property
    def key(self) -> str:
        return f"{self.name}@{self.distribution or 'unknown distribution'}"

    @property
    def folded(self) -> set[str]:
        return {switches.fold(name) for name in (self.name, self.distribution) if name}

    def to_dict(self) -> dict[str, Any]:
        """Row for the command line and the report."""
        state, reason = self.state, self.reason
        if state == "registered" and not self.error:
            found = [switches.probe_result(b) for _, b in self.registered if switches.has_probe(b)]
            refused = [r.text for _, r in found if r is not None]
            state = "probed" if found and all(ran for ran, _ in found) else state
            reason = "; ".join(refused) or reason
        return {
            "name": self.name,
            "distribution": self.distribution,
            "version": self.version,
            "entry_point": f"{self.name} = {self.value}",
            "builtin": self.builtin,
            "state": state,
            "ok": self.error is None and state in ("registered", "probed") and not reason,
            "reason": reason,
            "error": self.error,
            "load_ms": self.load_ms,
            "file": self.file,
            "backends": [{"operation": operation, "backend": b.backend_type} for operation, b in self.registered],
        }


class Discovery:
    """The plugins of the process. :meth:`ensure` is called whenever a plan is made; it scans once."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.running = False
        self.scanned = False
        self.plugins: dict[str, Plugin] = {}
        self._builtins: list[str] = []
        self._manager = self._fresh_manager()

    @staticmethod
    def _fresh_manager() -> pluggy.PluginManager:
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(Hooks)
        return manager

    def add_builtin(self, value: str) -> None:
        """An optional backend that core ships: ``module`` or ``module:object``. An allow-list does not hide it."""
        with self.lock:
            if value not in self._builtins:
                self._builtins.append(value)
                self.scanned = False
        REGISTRY.invalidate()

    def ensure(self, pin: Any = None) -> None:
        """Scan if that has not been done, and load what is admitted now and was not before.

        A second thread waits for the first. A plugin that calls an op while it is loaded comes back here in the same
        thread and goes on with what is registered so far.
        """
        if self.scanned and not self.running and not self._waiting():
            self._check_names()
            return
        failed: list[Plugin] = []
        with self.lock:
            if self.running:
                return
            self.running = True
            try:
                if not self.scanned:
                    self._scan()
                    self.scanned = True
                for plugin in self._waiting():
                    self._load(plugin, pin)
                    if plugin.error is not None:
                        failed.append(plugin)
            finally:
                self.running = False
        # Warnings come last: one that a filter turns into an exception must not leave the work half done.
        for plugin in failed:
            where = f" of {plugin.distribution} {plugin.version or ''}".rstrip() if plugin.distribution else ""
            settings.warn_once(
                "plugin",
                plugin.key,
                f"fla plugin {plugin.name}{where} is ignored ({plugin.state}): {plugin.reason}; "
                "`fla backends list` shows more",
                RuntimeWarning,
            )
        self._check_names()

    def _waiting(self) -> list[Plugin]:
        return [p for p in list(self.plugins.values()) if p.state in ("found", "blocked") and p.error is None]

    def blocked_variables(self) -> set[str]:
        """Variables that would admit a plugin which is kept out now."""
        return {name for p in self._waiting() for name in switches.conventional_variables(p.folded)}

    def _check_names(self) -> None:
        """Warn once for each plugin that FLA_PLUGINS names and each variable that mean nothing."""
        settings.check_environment()
        known = {name for plugin in self.plugins.values() for name in plugin.folded}
        for name in sorted(frozenset().union(*switches.plugin_list()) - known):
            settings.warn_once(
                "plugin name",
                name,
                f"FLA_PLUGINS names {name!r}, which is not an installed plugin{settings.nearest(name, known)}",
            )

    # Stages

    def _scan(self) -> None:
        found = [Plugin(value.partition(":")[0], value, "core", builtin=True) for value in self._builtins]
        try:
            import importlib_metadata

            points = list(importlib_metadata.entry_points(group=GROUP))
        except Exception as error:
            settings.warn_once("scan", "entry points", f"installed plugins cannot be listed: {error!r}", RuntimeWarning)
            points = []
        installed = [_found(point) for point in points]
        for plugin in found + sorted(installed, key=lambda p: (p.name, p.distribution or "", p.value)):
            self.plugins.setdefault(plugin.key, plugin)

    def _load(self, plugin: Plugin, pin: Any) -> None:
        reason = switches.kept_out(plugin.folded, builtin=plugin.builtin)
        if reason is not None and not switches.asked_for(plugin.folded, pin):
            plugin.state, plugin.reason = "blocked", reason
            return
        plugin.state, plugin.reason = "found", None
        began = time.perf_counter()
        target: Any = None
        try:
            if plugin.version is None and not plugin.builtin:
                raise PluginError("its distribution has no metadata (METADATA is missing or has no version)")
            where, _, attributes = plugin.value.partition("[")[0].partition(":")
            module = importlib.import_module(where.strip())
            plugin.file = getattr(module, "__file__", None)
            _check_api_version(module)
            target = module
            for attribute in filter(None, attributes.strip().split(".")):
                target = getattr(target, attribute)
            _check_api_version(target)
            plugin.state = "imported"
            registrar = Registrar(plugin.key, plugin.distribution)
            self._register(target, registrar, plugin)
            REGISTRY.commit(registrar.rows)
            plugin.registered = tuple((row.operation, row.backend) for row in registrar.rows)
            plugin.state = "registered"
        except (KeyboardInterrupt, GeneratorExit):
            self._forget(target)
            raise
        except BaseException as error:  # SystemExit too: a plugin must not end the program
            self._forget(target)
            plugin.reason = " ".join(f"{type(error).__name__}: {error}".split())
            plugin.error = traceback.format_exc()
        plugin.load_ms = round((time.perf_counter() - began) * 1e3, 3)

    def _register(self, target: Any, registrar: Registrar, plugin: Plugin) -> None:
        backend = target if isinstance(target, BaseBackend) else None
        if isinstance(target, type) and issubclass(target, BaseBackend):
            backend = target()
        if backend is not None:
            operations = (backend.operations,) if isinstance(backend.operations, str) else tuple(backend.operations)
            if not operations:
                raise PluginError(f"{backend!r} is the value of an entry point and names no operations")
            for operation in operations:
                registrar.register(operation, backend)
            return
        self._manager.register(target, name=plugin.key)
        if not self._manager.get_hookcallers(target):
            raise PluginError(f"{plugin.value} has no function register_backends marked with fla.backends.hookimpl")
        others = [other for other in self._manager.get_plugins() if other is not target]
        self._manager.subset_hook_caller("register_backends", others)(registry=registrar)
        if not registrar.rows:
            plugin.reason = "it registered nothing"

    def _forget(self, target: Any) -> None:
        if target is not None and self._manager.is_registered(target):
            self._manager.unregister(target)

    def refresh(self) -> None:
        """Drop what plugins registered, look at installed packages again, load again."""
        with self.lock:
            if self.running:
                raise PluginError("refresh() was called while plugins are being loaded")
            importlib.invalidate_caches()
            REGISTRY.remove(row for rows in REGISTRY.snapshot().values() for row in rows if row.plugin is not None)
            self.plugins.clear()
            self._manager = self._fresh_manager()
            self.scanned = False
            switches.forget()
        for op in REGISTRY.ops():
            op.forget()
        REGISTRY.invalidate()
        self.ensure()

    def after_fork(self) -> None:
        """In a forked child a lock may be held by a thread that is not there, in the middle of a scan."""
        self.lock = threading.RLock()
        REGISTRY.lock = threading.RLock()
        switches.renew_locks()
        if self.running:
            self.running, self.scanned = False, False
            REGISTRY.remove(row for rows in REGISTRY.snapshot().values() for row in rows if row.plugin is not None)
            self.plugins.clear()
            self._manager = self._fresh_manager()


def _found(point: Any) -> Plugin:
    """An entry point with what its distribution says of itself, which may be nothing."""
    distribution = version = None
    try:
        distribution, version = point.dist.name, point.dist.version
    except Exception:  # metadata missing or unreadable: the folder's name has to do
        path = getattr(point.dist, "_path", None)
        distribution = None if path is None else os.path.basename(str(path)).rpartition("-")[0] or str(path)
    return Plugin(point.name, point.value, distribution or None, version or None)


def _check_api_version(target: Any) -> None:
    """Compare the optional ``api_version`` of a plugin with ours."""
    version = getattr(target, "api_version", API_VERSION)
    if isinstance(version, bool) or not isinstance(version, int):
        raise PluginError(f"api_version must be an integer, got {version!r}")
    if version != API_VERSION:
        raise PluginError(f"written for api_version {version}, this core has api_version {API_VERSION}")


DISCOVERY = Discovery()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: DISCOVERY.after_fork())
