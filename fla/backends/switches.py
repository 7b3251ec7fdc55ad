# SPDX-License-Identifier: MIT
"""Whether a registered backend may be asked at all: enabled by the user, usable on this machine.

Strongest first: a pin, a setting in a context, a setting from Python, the backend's own variable, FLA_PLUGINS, the
default.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from typing import Any

from fla import settings
from fla.backends import devices
from fla.backends.base import BaseBackend, own_switch
from fla.backends.facts import Rejection
from fla.backends.registry import Registration

# FLA_PLUGINS


def fold(name: str) -> str:
    """A plugin's name as pip folds names, without ``fla-backend-``."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower().removeprefix("fla-backend-")


def squash(name: str) -> str:
    """``flash_kda`` and ``flashkda`` alike: for matching a variable or a backend type with a plugin."""
    return re.sub(r"[-_.]+", "", name).lower().removeprefix("flabackend")


def plugin_list() -> tuple[frozenset[str], frozenset[str]]:
    """Folded names that FLA_PLUGINS admits (empty: all) and keeps out."""
    items: tuple[str, ...] = settings.get("FLA_PLUGINS")
    only = frozenset(fold(item) for item in items if not item.startswith("-"))
    return only, frozenset(fold(item[1:]) for item in items if item.startswith("-"))


def kept_out(names: Iterable[str], *, builtin: bool = False) -> str | None:
    """Why FLA_PLUGINS keeps out a plugin of these folded names; None: it does not."""
    only, out = plugin_list()
    names = set(names)
    shown = ",".join(settings.get("FLA_PLUGINS"))
    if names & out:
        return f"kept out by FLA_PLUGINS={shown}"
    if only and not names & only and not builtin:
        return f"not among FLA_PLUGINS={shown}"
    return None


def conventional_variables(names: Iterable[str]) -> list[str]:
    """Variables that belong to a plugin by name, before its module may be imported: FLA_FLASH_KDA for flashkda."""
    squashed = {squash(name) for name in names}
    known = [name for name in settings.names() if name.startswith("FLA_") and squash(name[4:]) in squashed]
    return known or sorted(f"FLA_{re.sub(r'[-.]+', '_', name).upper()}" for name in names)


def asked_for(names: Iterable[str], pin: Any) -> bool:
    """Whether something stronger than FLA_PLUGINS turns a plugin on: a pin of its name, or its own variable."""
    names = list(names)
    if pin is not None and squash(pin.name) in {squash(name) for name in names}:
        return True
    for variable in conventional_variables(names):
        if variable in settings.names():
            chosen = settings.explicit(variable)
            if chosen is not None and chosen[0] is True:
                return True
        elif (settings.read_environment(variable) or "").strip().lower() in ("1", "true", "yes", "on"):
            return True
    return False


# Standing of one registration


def standing(row: Registration, pin: Any = None) -> tuple[Rejection | None, bool]:
    """Why the backend cannot be asked (None: it can), and whether the user named it (``slower`` is void then)."""
    disabled, forced = _enabled(row, pin)
    return disabled or availability(row.backend), forced


def _enabled(row: Registration, pin: Any) -> tuple[Rejection | None, bool]:
    backend = row.backend
    if pin is not None and pin.name == row.name:
        return None, True
    chosen = own_switch(backend)
    if chosen is not None:
        if chosen[0]:
            return None, True
        return Rejection("disabled", f"{backend.env_var} is off ({chosen[1]})"), False
    if row.plugin is not None:
        from fla.backends.discovery import DISCOVERY

        plugin = DISCOVERY.plugins.get(row.plugin)
        reason = None if plugin is None else kept_out(plugin.folded, builtin=plugin.builtin)
        if reason is not None:
            return Rejection("disabled", reason), False
    try:
        enabled = backend.is_enabled()
    except Exception as error:
        return Rejection("error", f"is_enabled raised {type(error).__name__}: {error}"), False
    if not enabled:
        how = f"; turn it on with {backend.env_var}=1" if backend.env_var else ""
        return Rejection("disabled", f"off by default{how}"), False
    return None, False


_usable: dict[int, tuple[BaseBackend, Rejection | None]] = {}
_probed: dict[int, tuple[BaseBackend, Rejection | None]] = {}
_probing = threading.local()
_probe_lock = threading.RLock()


def availability(backend: BaseBackend) -> Rejection | None:
    """Why a backend's packages are not usable, found out once. Nothing of the backend is run but is_available."""
    known = _usable.get(id(backend))
    if known is None:
        known = _usable[id(backend)] = (backend, _missing(backend))
    return known[1]


def _missing(backend: BaseBackend) -> Rejection | None:
    requires = (backend.requires,) if isinstance(backend.requires, str) else tuple(backend.requires)
    for text in requires:
        reason = _unmet(text)
        if reason is not None:
            return reason
    try:
        available = backend.is_available()
    except Exception as error:
        return Rejection("error", f"is_available raised {type(error).__name__}: {error}")
    if available:
        return None
    try:
        said = backend.unavailable_reason()
    except Exception as error:
        said = f"unavailable_reason raised {type(error).__name__}: {error}"
    if said is not None:
        return Rejection("unavailable", said)
    if backend.package_name is not None and not devices.has_module(backend.package_name):
        return Rejection("unavailable", f"module {backend.package_name} is not installed")
    return Rejection("unavailable", "is_available says no")


def _unmet(text: str) -> Rejection | None:
    import importlib_metadata
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        wanted = Requirement(text)
    except InvalidRequirement as error:
        return Rejection("error", f"requires has {text!r}, which is not a requirement: {error}")
    if wanted.marker is not None and not wanted.marker.evaluate():
        return None
    try:
        found = importlib_metadata.version(wanted.name)
    except importlib_metadata.PackageNotFoundError:
        return Rejection("unavailable", f"{text} is not installed")
    if not wanted.specifier.contains(found, prereleases=True):
        return Rejection("unavailable", f"{text} is needed, {wanted.name} {found} is installed")
    return None


def has_probe(backend: BaseBackend) -> bool:
    return type(backend).probe is not BaseBackend.probe


def probe_result(backend: BaseBackend) -> tuple[bool, Rejection | None]:
    """Whether the probe has been run, and why it refused. Runs nothing."""
    known = _probed.get(id(backend))
    return known is not None, None if known is None else known[1]


def probe(backend: BaseBackend) -> Rejection | None:
    """Run the one-time probe if it has not run. A probe that calls ops of its own backend finds it usable."""
    if not has_probe(backend):
        return None
    known = _probed.get(id(backend))
    running: set[int] = _probing.__dict__.setdefault("running", set())
    if known is not None or id(backend) in running:
        return None if known is None else known[1]
    with _probe_lock:
        known = _probed.get(id(backend))
        if known is None:
            running.add(id(backend))
            try:
                known = _probed[id(backend)] = (backend, _probe(backend))
            finally:
                running.discard(id(backend))
    return known[1]


def _probe(backend: BaseBackend) -> Rejection | None:
    # The probe runs under nobody's pin: what the caller pinned must not decide what the probe finds.
    try:
        with settings.push({"pin": None, "reference": False, "trace": ()}):
            answer = backend.probe()
    except (Exception, SystemExit) as error:
        return _refused(backend, f"its probe raised {type(error).__name__}: {error}")
    if isinstance(answer, tuple) and len(answer) == 2:
        return None if answer[0] else _refused(backend, f"its probe says: {answer[1]}")
    return None if answer is None or answer is True else _refused(backend, "its probe says no")


def _refused(backend: BaseBackend, text: str) -> Rejection:
    settings.warn_once(
        "probe", f"{id(backend)}", f"fla backend {backend.backend_type} stays out: {text}", RuntimeWarning
    )
    return Rejection("unavailable", text)


def forget() -> None:
    """Look at packages again and probe again."""
    _usable.clear()
    _probed.clear()
    devices.forget()


def renew_locks() -> None:
    """In a forked child: the probe lock may be held by a thread that is not there."""
    global _probe_lock
    _probe_lock = threading.RLock()
