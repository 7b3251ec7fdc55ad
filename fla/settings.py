# SPDX-License-Identifier: MIT
"""Every ``FLA_*`` variable: one typed table, one boolean grammar, one precedence.

A value comes from, strongest first: a context (:func:`override`), Python (:func:`set`), the environment, the default.
The environment is read at each use, so a change inside the process takes effect at the next call; a row whose ``read``
says otherwise is looked at only then.

This module is the only reader of ``FLA_*`` variables in the package. It imports neither torch nor plugins.
"""

from __future__ import annotations

import builtins
import difflib
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from fla._settings_table import BACKEND_READ, INERT, TABLE, Setting

__all__ = [
    "Setting",
    "check_environment",
    "describe",
    "explicit",
    "get",
    "markdown",
    "names",
    "origin",
    "override",
    "parse",
    "register_variable",
    "reset",
    "set",
    "unrecognised",
]

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_MISSING: Any = object()

_known: dict[str, Setting] = {row.name: row for row in TABLE}
_python: dict[str, Any] = {}
_said: builtins.set[tuple[str, str]] = builtins.set()
_listeners: list[Callable[[], None]] = []


# The environment


_EnvironmentAccess = tuple[Callable[[Any], Any], Callable[[Any], bool], Callable[[str], Any], Callable[[Any], str]]


def _open_environment() -> _EnvironmentAccess:
    """``(get, isdisjoint, encode, decode)`` over the mapping behind os.environ.

    A miss of os.environ.get costs about 0.8 us (it encodes the key and raises inside); the raw mapping takes 0.03.
    """
    environ: Any = os.environ
    data = getattr(environ, "_data", None)
    encode, decode = getattr(environ, "encodekey", None), getattr(environ, "decodevalue", None)
    if type(data) is dict and callable(encode) and callable(decode):
        return data.get, data.keys().isdisjoint, encode, decode
    return (
        os.environ.get,
        lambda keys: not any(key in os.environ for key in keys),
        lambda name: name,
        lambda value: value,
    )


environment_get, environment_isdisjoint, encode_name, _decode = _open_environment()


def read_environment(name: str) -> str | None:
    """Text of one variable, or None. Any name: a backend's variable may lack the prefix."""
    raw = environment_get(encode_name(name))
    return None if raw is None else _decode(raw)


# Contexts: one immutable object, so that "did anything change" is one identity test


class Context:
    """Values that hold for the current thread or task."""

    __slots__ = ("key", "values")

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)
        # Who listens does not change what is chosen, only whether it is written down.
        self.key = frozenset((name, bool(value) if name == "trace" else value) for name, value in values.items())


_context: ContextVar[Context | None] = ContextVar("fla_context", default=None)
current_context = _context.get


@contextmanager
def push(values: Mapping[str, Any]) -> Iterator[None]:
    """Lay ``values`` over the current context for the length of a ``with`` block. Shared with fla.backends."""
    below = _context.get()
    token = _context.set(Context({**(below.values if below is not None else {}), **values}))
    try:
        yield
    finally:
        _context.reset(token)


def on_change(listener: Callable[[], None]) -> None:
    """Call ``listener`` after each :func:`set` and :func:`reset`."""
    _listeners.append(listener)


def _changed() -> None:
    for listener in _listeners:
        listener()


# Names and values


def names() -> tuple[str, ...]:
    """Every variable that has a meaning now, backends' own included."""
    return tuple(sorted(_known))


def is_core(name: str) -> bool:
    """Whether a variable is core's own, so that no backend may be switched by it."""
    return name in _known and _known[name].owner == "core"


def _row(name: str) -> Setting:
    row = _known.get(name)
    if row is None:
        hint = nearest(name, _known)
        raise KeyError(f"no setting is called {name!r}{hint}")
    return row


def nearest(name: str, candidates: Iterable[str]) -> str:
    match = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6)
    return f"; did you mean {match[0]}?" if match else ""


_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
GENERATED = "<fla dispatch"


def callers_level() -> int:
    """``stacklevel`` for a warning of the calling function: that of the line which called into the package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_PACKAGE, GENERATED)):
        level, frame = level + 1, frame.f_back
    return level


def warn_once(topic: str, subject: str, message: str, category: type[Warning] = UserWarning) -> None:
    """Warn the first time that ``(topic, subject)`` comes up in this process."""
    if (topic, subject) not in _said:
        _said.add((topic, subject))
        warnings.warn(message, category, stacklevel=callers_level())


def parse(row: Setting, value: Any) -> Any:
    """``value`` (text or an object of the row's type) as the row's type.

    Raises:
        ValueError: it does not fit; the message names the variable, what was given and what is allowed.
    """
    wrong = ValueError(f"{row.name} must be {_allowed(row)}, got {value!r}")
    if row.type == "bool":
        if isinstance(value, bool):
            return value
        word = str(value).strip().lower() if isinstance(value, str | int) else ""
        if word in _TRUE or word in _FALSE:
            return word in _TRUE
        raise wrong
    if row.type == "int":
        try:
            number = int(value) if isinstance(value, str | int) and not isinstance(value, bool) else None
        except ValueError:
            number = None
        if number is None or (row.minimum is not None and number < row.minimum):
            raise wrong
        return number
    if row.type == "list":
        if isinstance(value, str):
            value = value.split(",")
        items = tuple(value) if isinstance(value, Iterable) else (value,)
        if not all(isinstance(item, str) for item in items):
            raise wrong
        return tuple(item.strip() for item in items if item.strip())
    if not isinstance(value, str) or (row.choices and value not in row.choices):
        raise wrong
    return value


def _allowed(row: Setting) -> str:
    if row.choices:
        return "one of " + ", ".join(row.choices)
    if row.type == "bool":
        return "one of 0/1/true/false/yes/no/on/off"
    if row.type == "int":
        return "an integer" + (f" >= {row.minimum}" if row.minimum is not None else "")
    return {"list": "a comma-separated list of names", "str": "text"}[row.type]


def _look_up(row: Setting) -> tuple[Any, str]:
    """Value and origin of a row. A value of the environment that does not parse is warned about and counts as unset."""
    context = _context.get()
    value = _MISSING if context is None else context.values.get(row.name, _MISSING)
    if value is not _MISSING:
        return (row.default, "default") if value is None else (value, "context")
    value = _python.get(row.name, _MISSING)
    if value is not _MISSING:
        return value, "set"
    text = read_environment(row.name)
    if text is not None and text.strip():
        try:
            return parse(row, text), "environment"
        except ValueError as error:
            warn_once("value", f"{row.name}={text}", f"{error}; the variable counts as unset")
    elif text is not None and row.type == "bool":
        warn_once("value", f"{row.name}=", f"{row.name} is empty, allowed: {_allowed(row)}; it counts as unset")
    return row.default, "default"


def get(name: str) -> Any:
    """Value in force now. A backend's own variable that nobody set gives the default of its row, often None.

    Raises:
        KeyError: no such setting; the message has the nearest name.
    """
    return _look_up(_row(name))[0]


def origin(name: str) -> str:
    """Where the value comes from: ``default``, ``environment``, ``set`` or ``context``."""
    return _look_up(_row(name))[1]


def explicit(name: str) -> tuple[Any, str] | None:
    """Value and origin where somebody chose it, None where the default holds."""
    value, source = _look_up(_row(name))
    return None if source == "default" else (value, source)


def set(name: str, value: Any) -> None:
    """Choose a value for the whole process, above the environment and below contexts. None takes the choice back.

    Raises:
        KeyError: no such setting.
        ValueError: the value does not fit; nothing is changed.
    """
    row = _row(name)
    if value is None:
        _python.pop(name, None)
    else:
        _python[name] = parse(row, value)
    _changed()


def reset(name: str | None = None) -> None:
    """Take back what :func:`set` chose, for one name or for all."""
    if name is None:
        _python.clear()
        _changed()
    else:
        set(name, None)


@contextmanager
def override(**values: Any) -> Iterator[None]:
    """Values for a ``with`` block, above everything else, for the current thread or task only.

    ``override(FLA_PLUGINS="-flashkda")``. None stands for the default, whatever the environment says.
    Raises as :func:`set` does, before anything changes.
    """
    parsed = {name: None if value is None else parse(_row(name), value) for name, value in values.items()}
    with push(parsed):
        yield


# Variables of backends, unknown names


def register_variable(name: str, *, default: bool | None, meaning: str, owner: str) -> None:
    """Make a backend's boolean variable known. The same name may serve several backends; the first row stays."""
    if name not in _known or _known[name].owner == owner:
        _known[name] = Setting(
            name,
            "bool",
            default,
            meaning,
            BACKEND_READ,
            owner=owner,
        )
        _said.discard(("name", name))


def unrecognised() -> dict[str, str]:
    """``FLA_*`` variables of the environment that mean nothing here, each with a sentence that says so."""
    found: dict[str, str] = {}
    for name in sorted(os.environ):
        if not name.startswith("FLA_") or name in _known:
            continue
        if name in INERT:
            found[name] = f"{name} has no effect in this package: {INERT[name]}"
        else:
            hint = nearest(name, _known)
            found[name] = f"{name} is not a variable of fla or of an installed backend{hint}"
    return found


def check_environment() -> None:
    """Warn once for each variable of :func:`unrecognised`."""
    for name, message in unrecognised().items():
        warn_once("name", name, message)


# Showing


def describe() -> list[dict[str, Any]]:
    """One row per setting with its value in force and where that came from, for the command line and reports."""
    rows = []
    for name in names():
        row = _known[name]
        value, source = _look_up(row)
        rows.append(
            {
                "name": name,
                "value": list(value) if isinstance(value, tuple) else value,
                "default": list(row.default) if isinstance(row.default, tuple) else row.default,
                "origin": source,
                "type": row.type,
                "allowed": _allowed(row),
                "read": row.read,
                "owner": row.owner,
                "meaning": row.meaning,
            }
        )
    return rows


def markdown() -> str:
    """The tables of docs/settings.md, from the table that ships with the package (no plugin's variables)."""

    def shown(row: Setting) -> str:
        if row.default is None:
            return "decided by the reader"
        return {True: "on", False: "off", (): "empty"}.get(row.default, str(row.default))

    lines = ["| variable | values | default | read | meaning |", "|---|---|---|---|---|"]
    lines += [f"| `{r.name}` | {_allowed(r)} | {shown(r)} | {r.read} | {r.meaning} |" for r in TABLE]
    lines += ["", "| variable of 0.6.0 without effect | why |", "|---|---|"]
    lines += [f"| `{name}` | {why} |" for name, why in sorted(INERT.items())]
    return "\n".join(lines) + "\n"
