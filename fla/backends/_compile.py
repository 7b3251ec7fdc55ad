# SPDX-License-Identifier: MIT
"""The bridge from a dispatched op to ``torch.compile``.

Under tracing the public wrapper calls `compiled_call`, which Dynamo traces down to one node per call:
``torch.ops.fla.<operation>_<function>``. Selection happens inside that node, at run time, so a graph holds no verdict
of a verifier and no switch. Static arguments are constants of the graph; another value compiles another graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import guard_scalar

from fla.backends import _compile_ops as ops
from fla.backends._compile_schema import OPAQUE, TENSOR, TREE, flatten_tree, static_key, unflatten_tree

__all__ = ["compiled_call", "register"]


def register(op: Any) -> str:
    """Register the custom ops of `op`, once, and return the name under ``torch.ops.fla``.

    Tracing does this by itself. A process that loads an exported program calls it first for each op in the program.
    """
    return ops.register(op).name


def compiled_call(op: Any, args: tuple[Any, ...]) -> Any:
    """Call the custom op of `op`; `args` holds a value for every parameter, in order.

    Dynamo traces this with ``fullgraph=True``; called without a compiler it runs the custom op as well.
    """
    name = _name(op)
    slots: list[Any] = []
    differentiable = False
    for part, given in zip(_layout(op).split(";"), args, strict=True):
        value = given
        parameter, kinds = part.split(":")
        placed = value is None
        for kind in kinds.split(","):
            if kind == OPAQUE:
                if not placed:
                    _check_default(op, parameter, value)
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
                elif kind in ("int", "float"):
                    # A number that changed between calls comes back from Dynamo as a symbol: pin it to its value.
                    value = guard_scalar(value)
                    if kind == "float":
                        value = float(value)
                slots.append(value)
                placed = True
            else:
                slots.append(None)
        if not placed:
            _refuse(op, parameter, type(value).__name__)
    differentiable = differentiable and torch.is_grad_enabled()
    leaves = getattr(torch.ops.fla, name).default(*slots, differentiable)
    return unflatten_tree(_structure(op, static_key(slots)), leaves)


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


# Dynamo runs the functions below while it traces and keeps the result as a constant. None of the results changes for
# one op and one key.


@torch.compiler.assume_constant_result
def _name(op: Any) -> str:
    return ops.register(op).name


@torch.compiler.assume_constant_result
def _layout(op: Any) -> str:
    return ops.register(op).layout.text


@torch.compiler.assume_constant_result
def _structure(op: Any, key: tuple[Any, ...]) -> str:
    return ops.register(op).structure[key]


@torch.compiler.assume_constant_result
def _check_default(op: Any, parameter: str, value: Any) -> None:
    if value != op.signature.parameters[parameter].default:
        _refuse(op, parameter, type(value).__name__)


@torch.compiler.assume_constant_result
def _refuse(op: Any, parameter: str, given: str) -> None:
    raise TypeError(
        f"{op.name}: {parameter} is a {given}, which torch.compile cannot carry into the graph here; "
        f"its annotation is {op.signature.parameters[parameter].annotation!r}. Call the op outside the compiled region"
    )
