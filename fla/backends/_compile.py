# SPDX-License-Identifier: MIT
"""The bridge from a dispatched op to ``torch.compile``.

Under tracing the public wrapper calls what `bridge` made for its op, which Dynamo traces down to one node per call:
``torch.ops.fla.<operation>_<function>``. Selection happens inside that node, at run time, so a graph holds no verdict
of a verifier and no switch. Static arguments are constants of the graph; another value compiles another graph.

Nothing here costs before the first trace: the custom ops are registered then, and Dynamo is not imported earlier.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fla.backends._compile_schema import OPAQUE, TENSOR, TREE, flatten_tree, static_key, unflatten_tree

__all__ = ["bridge", "register"]

_F = TypeVar("_F", bound=Callable[..., Any])

_ops: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def bridge(op: Any) -> Callable[[Any, tuple[Any, ...]], Any]:
    """``call(op, args)`` for the wrapper of `op`, to be traced; `args` holds a value for every parameter, in order."""
    name = enroll(op)

    def call(_: Any, args: tuple[Any, ...]) -> Any:
        return compiled_call(name, args)

    return call


def enroll(op: Any) -> str:
    """The name of the custom op of `op`. Strings are what every Dynamo takes for constants, objects are not."""
    with _lock:
        for name, known in _ops.items():
            if known is op:
                return name
        stem = "".join(c if c.isalnum() else "_" for c in f"{op.operation}_{op.name}")
        name, n = stem, 1
        while name in _ops or hasattr(torch.ops.fla, name):  # an op defined anew in one process, as notebooks do
            n += 1
            name = f"{stem}_{n}"
        _ops[name] = op
        return name


def register(op: Any) -> str:
    """Register the custom ops of `op`, once, and return the name under ``torch.ops.fla``.

    Tracing does this by itself. A process that loads an exported program calls it first for each op in the program.
    """
    name = enroll(op)
    _entry(name)
    return name


def compiled_call(name: str, args: tuple[Any, ...]) -> Any:
    """Call a custom op with the arguments of its op."""
    slots: list[Any] = []
    differentiable = False
    for part, given in zip(_layout(name).split(";"), args, strict=True):
        value = given
        parameter, kinds = part.split(":")
        placed = value is None
        for kind in kinds.split(","):
            if kind == OPAQUE:
                if not placed and isinstance(value, (bool, int, float, str)):
                    _check_default(name, parameter, value)
                    placed = True
            elif kind == TREE:
                leaves: list[torch.Tensor] = []
                tree = flatten_tree(value, leaves)
                slots.append(leaves)
                slots.append("n" if tree is None else tree)
                placed = placed or tree is not None
                for leaf in leaves:
                    differentiable = differentiable or leaf.requires_grad
            elif not placed and _fits(kind, value):
                if kind == TENSOR:
                    differentiable = differentiable or value.requires_grad
                elif kind == "int":
                    # A number that changed between calls comes back from Dynamo as a symbol; this pins it to its value.
                    value = operator.index(value)
                elif kind == "float":
                    value = float(value)  # a symbol is pinned by the schema
                slots.append(value)
                placed = True
            else:
                slots.append(None)
        if not placed:
            _refuse(name, parameter, type(value).__name__)
    differentiable = differentiable and torch.is_grad_enabled()
    leaves = getattr(torch.ops.fla, name).default(*slots, differentiable)
    return unflatten_tree(_structure(name, static_key(slots)), leaves)


def _fits(kind: str, value: Any) -> bool:
    if kind == TENSOR:
        return isinstance(value, torch.Tensor)
    if kind == "float":
        return isinstance(value, (float, int, torch.SymFloat)) and not isinstance(value, bool)
    if kind == "int":
        return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
    if kind == "dtype":
        return isinstance(value, torch.dtype)
    return isinstance(value, bool if kind == "bool" else str)


def _constant(fn: _F) -> _F:
    """Dynamo runs `fn` while it traces and keeps the result as a constant.

    The same as `torch.compiler.assume_constant_result`, which would import Dynamo here and now.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def _entry(name: str) -> Any:
    from fla.backends import _compile_ops

    return _compile_ops.register(name, _ops[name])


# None of the results below changes for one name and key.


@_constant
def _layout(name: str) -> str:
    return str(_entry(name).layout.text)


@_constant
def _structure(name: str, key: tuple[Any, ...]) -> str:
    return str(_entry(name).structure[key])


@_constant
def _check_default(name: str, parameter: str, value: Any) -> None:
    if value != _ops[name].signature.parameters[parameter].default:
        _refuse(name, parameter, type(value).__name__)


@_constant
def _refuse(name: str, parameter: str, given: str) -> None:
    op = _ops[name]
    raise TypeError(
        f"{op.name}: {parameter} is a {given}, which torch.compile cannot carry into the graph here; "
        f"its annotation is {op.signature.parameters[parameter].annotation!r}. Call the op outside the compiled region"
    )
