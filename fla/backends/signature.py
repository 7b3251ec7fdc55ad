# SPDX-License-Identifier: MIT
"""Comparing a backend's parameters with the op's, and calling it with the op's arguments in order.

Every implementation and verifier is called through one convention: a value for each parameter of the op, in order. So a
positional and a keyword call of the op are the same call to every backend.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Any

from fla.backends.errors import SignatureMismatch
from fla.settings import GENERATED

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Binding:
    """How a target is called: the argument list as source text, and the op's parameters that it does not take."""

    text: str
    missing: tuple[str, ...]


def argument_text(signature: Signature) -> str:
    """``q, k, scale`` with keyword-only parameters as ``name=name``: a call of the op itself."""
    return bind(signature, signature, "").text


def bind(signature: Signature, target: Signature, where: str) -> Binding:
    """Match ``target`` with the op's ``signature``.

    Raises:
        SignatureMismatch: the target has a parameter that the op lacks (a new or a renamed one).
    """
    op, wanted = signature.parameters, target.parameters
    open_op = any(p.kind is Parameter.VAR_KEYWORD for p in op.values())
    unknown = [
        name
        for name, p in wanted.items()
        if name not in op and p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) and not open_op
    ]
    if unknown:
        raise SignatureMismatch(
            f"{where} has parameter{'s' * (len(unknown) > 1)} {', '.join(unknown)}, which the op does not have; "
            f"its parameters are {', '.join(op)}"
        )
    takes_any = any(p.kind is Parameter.VAR_KEYWORD for p in wanted.values())
    takes_rest = any(p.kind is Parameter.VAR_POSITIONAL for p in wanted.values())
    slots = [p.name for p in wanted.values() if p.kind in _POSITIONAL]
    parts: list[str] = []
    missing: list[str] = []
    in_order = True
    for index, p in enumerate(op.values()):
        if p.kind is Parameter.VAR_POSITIONAL:
            if takes_rest and in_order:
                parts.append(f"*{p.name}")
            else:
                missing.append(p.name)
        elif p.kind is Parameter.VAR_KEYWORD:
            if takes_any:
                parts.append(f"**{p.name}")
            else:
                missing.append(p.name)
        elif (p.kind in _POSITIONAL and in_order and index < len(slots) and slots[index] == p.name) or (
            p.kind in _POSITIONAL and in_order and index >= len(slots) and takes_rest
        ):
            parts.append(p.name)
        elif (p.name in wanted and wanted[p.name].kind is not Parameter.POSITIONAL_ONLY) or takes_any:
            in_order = False
            parts.append(f"{p.name}={p.name}")
        else:
            in_order = False
            missing.append(p.name)
    reached = {part.split("=")[0] for part in parts}
    needed = [
        name
        for name, p in wanted.items()
        if p.default is Parameter.empty
        and p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        and name not in reached
    ]
    if needed:
        raise SignatureMismatch(f"{where} needs {', '.join(needed)}, which a call of the op cannot give it")
    return Binding(", ".join(parts), tuple(missing))


def bind_callable(signature: Signature, target: Callable[..., Any], where: str) -> Binding:
    """:func:`bind` with the parameters of a callable."""
    try:
        return bind(signature, inspect.signature(target), where)
    except ValueError:  # a builtin without a readable signature: trust the order
        return Binding(argument_text(signature), ())


def positional(signature: Signature, target: Callable[..., Any], binding: Binding) -> Callable[..., Any]:
    """``target`` as a callable that takes a value for each parameter of the op, in order."""
    names = list(signature.parameters)
    if binding.text == ", ".join(names):
        return target
    source = f"lambda {', '.join(names)}: _target({binding.text})"
    adapter: Callable[..., Any] = eval(compile(source, f"{GENERATED}>", "eval"), {"_target": target})
    return adapter


def is_default(value: Any, default: Any) -> bool:
    """Whether an argument says no more than leaving it out would. Never compares tensors."""
    if value is default:
        return True
    plain = (bool, int, float, str, tuple, type(None))
    return isinstance(value, plain) and isinstance(default, plain) and type(value) is type(default) and value == default
