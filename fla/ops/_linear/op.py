# SPDX-License-Identifier: MIT
"""From a function to a public op of the linear family: validation, call facts and output shapes, by the op's row.

All ops of the family give the same names the same meaning, so everything here is read off the parameter names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from fla.backends import CallFacts, dispatch
from fla.ops._common import checks
from fla.ops._common.checks import ArgumentError
from fla.ops._common.gates import compute_dtype
from fla.ops._common.old_keywords import HEAD_FIRST, STATE_LAYOUT
from fla.ops._common.seen import unless_seen
from fla.ops._linear.rows import GATE_SHAPES, LinearRow

__all__ = ["HEAD_FIRST", "STATE_LAYOUT", "linear_op", "state_outputs"]

CHUNK_SIZES = (16, 32, 64, 128)

Values = Mapping[str, Any]
_F = TypeVar("_F", bound=Callable[..., Any])


def linear_op(
    row: LinearRow,
    *,
    check: Callable[[Values], None] | None = None,
    outputs: Callable[[Values], Any] | None = None,
    renamed: dict[str, str] | None = None,
    removed: dict[str, str] | None = None,
    **options: Any,
) -> Callable[[_F], _F]:
    """Make the decorated function, whose body is the PyTorch path, a dispatched op.

    Args:
        row: the op's row.
        check: further checks, given all arguments by name; runs after the shared ones.
        outputs: empty results, given all arguments by name; None for ``(o, final_state)``.
        renamed, removed, options: as in :func:`fla.backends.dispatch`; ``triton`` and ``triton_verifier`` are options.
    """

    def decorate(fn: _F) -> _F:
        parameters = inspect.signature(fn).parameters
        names = tuple(parameters)
        required = tuple(
            n for n, p in parameters.items() if p.default is p.empty and n in (row.query, "k", "v", *row.gates)
        )

        def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
            values = {**dict(zip(names, args, strict=False)), **kwargs}
            return {"q": values[row.query], **values}

        def validate(*args: Any, **kwargs: Any) -> None:
            values = bind(args, kwargs)
            for name in required:
                checks.check_tensor(name, values.get(name))
            _check_call(row, values)
            if check is not None:
                check(values)

        def empty_outputs(*args: Any, **kwargs: Any) -> Any:
            return (outputs or state_outputs)(bind(args, kwargs))

        facts = CallFacts(tensors=(row.query, "k", "v"))
        options.update(renamed=renamed, removed=removed)
        return dispatch(row.op, validate=unless_seen(validate, names), facts=facts, outputs=empty_outputs, **options)(
            fn
        )

    return decorate


def _check_call(row: LinearRow, values: Values) -> None:
    get = values.get
    q, k, v = values["q"], values["k"], values["v"]
    gates: dict[str, Tensor | None] = {name: get(name) for name in row.gates}
    shapes = {name: (gate, GATE_SHAPES[row.gates[name]]) for name, gate in gates.items()}
    heads = {row.query: q, "k": k, "v": v}
    sizes = checks.check_shapes(**{row.query: (q, "B T H K")}, k=(k, "B T H K"), v=(v, "B T H V"), **shapes)
    checks.check_same_dtype(**heads)
    checks.check_floating(**gates)
    if gates.get("g") is not None and gates.get("g_gamma") is not None:
        raise ArgumentError("`g` and `g_gamma` exclude each other: add them up and pass the sum as `g` [B, T, H].")
    gamma = gates.get("g_gamma")
    if gamma is not None and gamma.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError("`g_gamma` has no gradient: detach it, or pass it as `g`, expanded to [B, T, H].")
    B, T, H, K, V = (sizes[axis] for axis in "BTHKV")
    states = _states(row, values)
    checks.check_same_device(**heads, **gates, **states)
    cu_seqlens, kv = get("cu_seqlens"), states.get("initial_state")
    N = checks.check_varlen(
        cu_seqlens, get("cu_seqlens_cpu"), B, T, kv, device=None if cu_seqlens is None else q.device
    )
    checks.check_state("initial_state", kv, N, H, K, V, bool(get("state_v_first")))
    if (z := states.get("initial_state[1]")) is not None:
        checks.check_shapes({"N": N, "1": 1, "H": H, "K": K}, **{"initial_state[1]": (z, "N 1 H K")})
        checks.check_floating(**{"initial_state[1]": z})
    checks.check_scale(get("scale"), K)
    if get("chunk_size") is not None:
        checks.check_chunk_size(values["chunk_size"], CHUNK_SIZES)


def _states(row: LinearRow, values: Values) -> dict[str, Tensor | None]:
    """The initial states by the names that errors call them."""
    state = values.get("initial_state")
    if not row.normaliser or not isinstance(state, (tuple, list)):
        return {"initial_state": state}
    if not values.get("normalize"):
        raise ArgumentError(
            "`initial_state` must be one tensor [N, H, K, V] with normalize=False, "
            f"got a {type(state).__name__}: the pair (state, z) goes with normalize=True."
        )
    if len(state) != 2:
        raise ArgumentError(f"`initial_state` must be a pair (state, z) or a tensor, got {len(state)} elements.")
    for name, part in zip(("initial_state[0]", "initial_state[1]"), state, strict=True):
        if part is not None:
            checks.check_tensor(name, part)
    return {"initial_state": state[0], "initial_state[1]": state[1]}


def state_outputs(values: Values) -> tuple[Tensor, Tensor | None]:
    """Empty ``(o, final_state)`` of a call."""
    q, v = values["q"], values["v"]
    o = v.new_empty(v.shape, dtype=q.dtype)
    if not values.get("output_final_state"):
        return o, None
    cu_seqlens = values.get("cu_seqlens")
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    K, V = q.shape[-1], v.shape[-1]
    rest = (V, K) if values.get("state_v_first") else (K, V)
    return o, q.new_empty((N, q.shape[2], *rest), dtype=compute_dtype(q.dtype))
