# SPDX-License-Identifier: MIT
"""Arguments for a call that is only asked about: tensors without data, in the shapes an op's parameters have."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fla.cli._output import CliError

AXES = ("B", "T", "H", "HV", "K", "V", "N")
_DEFAULTS = {"B": 1, "T": 64, "H": 1, "K": 64, "V": 64}

# Parameter -> axes; "op.parameter" comes first. `A*B` is one axis of that size, `N+1` is one longer.
_SHAPES = {
    "q": "B T H K",
    "k": "B T H K",
    "v": "B T HV V",
    "g": "B T HV",
    "r": "B T H K",
    "p": "B T H K",
    "b": "B T HV K",
    "w": "B T HV V",
    "kda.g": "B T HV K",
    "gdn2.g": "B T HV K",
    "gla.g": "B T H K",
    "rwkv6.w": "B T H K",
    "s": "B T H K",  # as many slots as key channels
    "gsa.g": "B T H K",
    "u": "H K",
    "x": "B T K",
    "hgrn.g": "B T K",
    "hgrn.initial_state": "N K",
    "gk": "B T HV K",
    "gv": "B T HV V",
    "g_gamma": "H",
    "beta": "B T HV",
    "A_log": "HV",
    "dt_bias": "HV",
    "kda.dt_bias": "HV*K",
    "gdn2.dt_bias": "HV*K",
    "initial_state": "N HV K V",
    "cu_seqlens": "N+1",
    "cu_seqlens_cpu": "N+1",
}
_FLOAT32 = frozenset({"g_gamma", "A_log", "dt_bias", "initial_state"})
_INTEGERS = frozenset({"cu_seqlens", "cu_seqlens_cpu"})
# A switch that makes optional tensors necessary.
_IMPLIED = {"use_gate_in_kernel": ("A_log", "dt_bias")}
_DTYPES = ("float16", "bfloat16", "float32", "float64")


def find_function(name: str) -> Callable[..., Any]:
    """The op that `kda.chunk_kda`, `chunk_kda` or `fla.ops.kda.chunk_kda` means."""
    module, _, function = name.removeprefix("fla.ops.").rpartition(".")
    if not module:
        from fla.cli._inventory import static_entries

        rooms = [e.module for e in static_entries(("ops",)) if e.name == function]
        if not rooms:
            raise CliError(f"no op is called {function!r}; `fla ops` lists them")
        module = rooms[0].removeprefix("fla.ops.")
    try:
        room = importlib.import_module(f"fla.ops.{module}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("fla."):
            raise
        raise CliError(f"there is no module fla.ops.{module}; `fla ops` lists what there is") from None
    if not callable(getattr(room, function, None)):
        raise CliError(
            f"fla.ops.{module} has no function {function!r}; `fla ops --filter {module}` lists its functions"
        )
    result: Callable[..., Any] = getattr(room, function)
    return result


def parse_shape(text: str) -> dict[str, int]:
    """`B1,T64,H2,K64,V64` as sizes. `HV` defaults to H; `N` asks for a packed call of N sequences."""
    sizes = dict(_DEFAULTS)
    for part in filter(None, re.split(r"[,\s]+", text.strip())):
        match = re.fullmatch(r"([A-Za-z]+)=?(\d+)", part)
        if match is None or match[1].upper() not in AXES:
            raise CliError(f"--shape: {part!r} is not a size; write e.g. B1,T64,H2,K64,V64 (axes: {' '.join(AXES)})", 2)
        sizes[match[1].upper()] = int(match[2])
    sizes.setdefault("HV", sizes["H"])
    if sizes.get("N") is not None and sizes["B"] != 1:
        raise CliError(f"--shape: a packed call (N{sizes['N']}) has B1, got B{sizes['B']}", 2)
    return sizes


def parse_values(pairs: Sequence[str]) -> dict[str, Any]:
    """`name=value` words; a value is a Python literal, `true`, `false`, or else text."""
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise CliError(f"--arg {pair!r} must have the form NAME=VALUE", 2)
        try:
            values[name] = {"true": True, "false": False, "none": None}.get(text.lower(), ...)
            if values[name] is ...:
                values[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            values[name] = text
    return values


def build_arguments(
    function: Callable[..., Any],
    operation: str,
    sizes: Mapping[str, int],
    *,
    dtype: str,
    device: str,
    values: Mapping[str, Any],
    tensors: Sequence[str] = (),
    grad: bool = False,
) -> dict[str, Any]:
    """Keyword arguments for `function`: a tensor for every parameter that needs one, `values` for the rest.

    Args:
        tensors: optional parameters that also get a tensor.
        grad: the floating tensors require gradients.
    """
    parameters = inspect.signature(function).parameters
    for name in [*values, *tensors]:
        if name not in parameters:
            raise CliError(f"{function.__name__} has no parameter {name!r}; it has: {', '.join(parameters)}", 2)
    wanted = {n for n, p in parameters.items() if p.default is p.empty and n not in values} | set(tensors)
    for switch, implied in _IMPLIED.items():
        if values.get(switch):
            wanted.update(n for n in implied if n in parameters and n not in values)
    if "N" in sizes:
        wanted.add("cu_seqlens")
    arguments = dict(values)
    for name in (n for n in parameters if n in wanted):
        axes = _SHAPES.get(f"{operation}.{name}", _SHAPES.get(name))
        if axes is None:
            raise CliError(f"{function.__name__} also needs {name}: give it with --arg {name}=VALUE", 2)
        if name == "initial_state" and values.get("state_v_first"):
            axes = "N HV V K"
        arguments[name] = _tensor(name, axes, sizes, dtype, device, grad)
    return arguments


def _tensor(name: str, axes: str, sizes: Mapping[str, int], dtype: str, device: str, grad: bool) -> Any:
    import torch

    if dtype not in _DTYPES:
        raise CliError(f"--dtype {dtype!r} must be one of {', '.join(_DTYPES)}", 2)
    known = {"N": sizes["B"], **sizes}
    shape = [_size(axis, known) for axis in axes.split()]
    if name in _INTEGERS:
        return torch.empty(shape, dtype=torch.int32, device="cpu" if name.endswith("_cpu") else device)
    kind = torch.float32 if name in _FLOAT32 else getattr(torch, dtype)
    return torch.empty(shape, dtype=kind, device=device, requires_grad=grad)


def _size(axis: str, sizes: Mapping[str, int]) -> int:
    if axis.endswith("+1"):
        return sizes[axis.removesuffix("+1")] + 1
    result = 1
    for factor in axis.split("*"):
        result *= sizes[factor]
    return result
