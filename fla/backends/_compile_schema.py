# SPDX-License-Identifier: MIT
"""How an op's Python call maps to a ``torch.library`` schema and back.

A schema knows tensors, lists of tensors and plain scalars; a call may also hold tuples of tensors (a state made of two
parts). Each parameter becomes one or more schema arguments, its slots, chosen from the parameter's annotation alone:
the same op has the same schema in every process, so cached and exported graphs stay valid.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

TENSOR, TREE, OPAQUE = "tensor", "tree", "opaque"
_SCALARS = {"bool": "bool", "int": "int", "float": "float", "str": "str", "dtype": "ScalarType"}
_CONTAINERS = frozenset({"tuple", "list", "sequence"})
_SILENT = frozenset({"torch", "typing", "collections", "abc", "none", "nonetype", "optional", "union", "t", "ellipsis"})


@dataclass(frozen=True)
class Param:
    """One parameter of the op: ``kinds`` in the order of its slots."""

    name: str
    kinds: tuple[str, ...]
    nullable: bool
    default: Any = None


@dataclass(frozen=True)
class Layout:
    """The slots of all parameters. ``text`` is the form of `params` that Dynamo can hold as a constant."""

    params: tuple[Param, ...]
    text: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", ";".join(f"{p.name}:{','.join(p.kinds)}" for p in self.params))

    @property
    def schema(self) -> str:
        """The argument list of the schema, without the parentheses."""
        parts: list[str] = []
        for p in self.params:
            for i, kind in enumerate(p.kinds):
                name = p.name if i == 0 else f"{p.name}_{kind}"
                mark = "?" if p.nullable or len(p.kinds) > 1 else ""
                if kind == TREE:
                    parts += [f"Tensor[] {name}", f"str {name}_tree"]
                elif kind == TENSOR:
                    parts.append(f"Tensor{mark} {name}")
                elif kind != OPAQUE:
                    parts.append(f"{_SCALARS[kind]}{mark} {name}")
        return ", ".join(parts)


def layout_of(signature: inspect.Signature, fn: Callable[..., Any] | None = None) -> Layout:
    """Read the slots off a signature. `fn` lends its globals, in which string annotations are looked up."""
    namespace = getattr(inspect.unwrap(fn), "__globals__", {}) if fn is not None else {}
    params = []
    for p in signature.parameters.values():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            raise TypeError(f"{p.name}: an op that is compiled must name all its parameters")
        kinds, nullable = _kinds(p, namespace)
        params.append(Param(p.name, kinds, nullable, None if p.default is p.empty else p.default))
    return Layout(tuple(params))


def _kinds(p: inspect.Parameter, namespace: dict[str, Any]) -> tuple[tuple[str, ...], bool]:
    if p.annotation is p.empty:
        if type(p.default) in (bool, int, float, str):
            return (type(p.default).__name__,), False
        return (TENSOR,), p.default is None
    annotation = p.annotation
    if isinstance(annotation, str):
        # An alias such as `State` only shows its parts once it is evaluated. Where a name was imported for type
        # checkers only, the text has to do.
        with contextlib.suppress(Exception):
            annotation = eval(annotation, dict(namespace))
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    if "Literal" in text:
        text = re.sub(r"Literal\[[^\]]*\]", "str" if re.search(r"['\"]", text) else "int", text)
    words = {w.lower() for w in re.findall(r"\w+", text)}
    words = {"tensor" if w.endswith("tensor") or w == "parameter" else w for w in words}
    nullable = bool(words & {"none", "nonetype", "optional"}) or p.default is None
    container = bool(words & _CONTAINERS)
    kinds = [k for k in _SCALARS if k in words]
    if "int" in kinds and "float" in kinds:
        kinds.remove("int")  # a float slot takes both
    if "tensor" in words:
        kinds.insert(0, TREE if container else TENSOR)
    known = words <= {*_SCALARS, *_CONTAINERS, *_SILENT, "tensor"}
    # A container of scalars has no slot; neither has a class that the schema language does not know.
    if not known or not kinds or (container and "tensor" not in words):
        kinds = [k for k in kinds if k in (TENSOR, TREE)] + [OPAQUE]
    return tuple(kinds), nullable


def flatten_tree(value: Any, leaves: list[torch.Tensor]) -> str | None:
    """Append the tensors of nested tuples to `leaves`; the text says where they go: t tensor, n None, () a tuple.

    None where something else lies in the tree. Written so that Dynamo can trace it.
    """
    if value is None:
        return "n"
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        return "t"
    if not isinstance(value, (tuple, list)):
        return None
    text = "("
    for item in value:
        part = flatten_tree(item, leaves)
        if part is None:
            return None
        text = text + part
    return text + ")"


def unflatten_tree(text: str, leaves: Sequence[torch.Tensor]) -> Any:
    """The inverse of `flatten_tree`; lists come back as tuples. Written so that Dynamo can trace it."""
    stack: list[list[Any]] = [[]]
    taken = 0
    for mark in text:
        if mark == "(":
            stack.append([])
        elif mark == ")":
            done = tuple(stack.pop())
            stack[-1].append(done)
        elif mark == "n":
            stack[-1].append(None)
        else:
            stack[-1].append(leaves[taken])
            taken += 1
    return stack[0][0]


def unpack(layout: Layout, slots: Sequence[Any]) -> tuple[Any, ...]:
    """The op's positional arguments out of the schema's."""
    args: list[Any] = []
    at = 0
    for p in layout.params:
        value: Any = None
        for kind in p.kinds:
            if kind == OPAQUE:
                value = p.default if value is None else value
                continue
            if kind == TREE:
                found = unflatten_tree(slots[at + 1], slots[at])
                at += 2
            else:
                found = slots[at]
                at += 1
            value = found if value is None else value
        args.append(value)
    return tuple(args)


def static_key(slots: Sequence[Any]) -> tuple[Any, ...]:
    """What decides the structure of the outputs: every static but the value of floats, and which tensors are there."""
    key: list[Any] = []
    for slot in slots:
        if isinstance(slot, torch.Tensor):
            key.append("tensor")
        elif isinstance(slot, (float, torch.SymFloat)):
            key.append("float")
        elif not isinstance(slot, (tuple, list)):
            key.append(slot)
    return tuple(key)
