# SPDX-License-Identifier: MIT
"""Argument checks shared by every op.

A check names the argument, what was given and what is allowed, and runs before anything is computed. Ranks, shapes,
dtypes and devices are read from metadata, so these checks never wait for a device. Values are read only where that is
free: from CPU tensors, or anywhere under ``FLA_CHECK_INPUTS=1``, and never while a graph is traced or captured.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_INDEX_DTYPES = frozenset({torch.int32, torch.int64})


class ArgumentError(ValueError, AssertionError):
    """A wrong argument. Callers of the reference package catch either base class."""


class DtypeError(ArgumentError, TypeError):
    """An argument of the wrong type or dtype."""


def _given(tensor: Tensor) -> str:
    return f"shape {list(tensor.shape)}"


@functools.cache
def _layouts(spec: str) -> dict[int, tuple[str, ...]]:
    """``"B T H | B T H V"`` as a table from rank to axis names."""
    return {len(axes): axes for axes in (tuple(part.split()) for part in spec.split("|"))}


def _shape_error(
    name: str, tensor: Tensor, spec: str, known: Mapping[str, int], sources: dict[str, str]
) -> ArgumentError:
    forms = " or ".join("[" + ", ".join(axes) + "]" for axes in _layouts(spec).values())
    axes = sorted({axis for form in _layouts(spec).values() for axis in form} & set(known))
    where = ", ".join(
        f"{axis} = {known[axis]}" + (f" from {sources[axis]}" if axis in sources else "") for axis in axes
    )
    return ArgumentError(
        f"`{name}` must have shape {forms}" + (f" with {where}" if where else "") + f", got {_given(tensor)}."
    )


_TENSORS = (Tensor, torch.nn.Parameter)
_PLAIN = (type(None), bool, int, float)


def _picker(places: list[int]) -> Callable[[Any], Any]:
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda values: tuple(values[i] for i in places)


@functools.lru_cache(maxsize=1024)
def _pickers(types: tuple[type, ...]) -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    """What picks the tensors out of values of these types, and what the others; None where a type is no plain data."""
    if not all(t in _TENSORS or t in _PLAIN for t in types):
        return None
    tensors = [i for i, t in enumerate(types) if t in _TENSORS]
    return _picker(tensors), _picker([i for i, t in enumerate(types) if t in _PLAIN])


def static_facts(values: Iterable[Any]) -> tuple[Any, ...] | None:
    """What checks of shapes, dtypes, devices, flags and gradients look at, as a key; None where that is no plain data.

    Numbers come with their type: 1, 1.0 and True are equal keys, but not equally good arguments.
    """
    if torch.compiler.is_compiling():
        return None
    values = tuple(values)
    types = tuple(map(type, values))
    pickers = _pickers(types)
    if pickers is None:
        return None
    tensors, others = pickers
    grad = torch.is_grad_enabled()
    key: list[Any] = [grad, types, others(values)]
    for x in tensors(values):
        key += (x.shape, x.dtype, x.device, grad and x.requires_grad)
    return tuple(key)


def check_tensor(name: str, value: Any) -> None:
    """Raise unless ``value`` is a tensor."""
    if not isinstance(value, Tensor):
        raise DtypeError(f"`{name}` must be a tensor, got {type(value).__name__}.")


def check_shapes(known: Mapping[str, int] | None = None, /, **tensors: tuple[Tensor | None, str]) -> dict[str, int]:
    """Check that shapes agree and return the size of every axis.

    Each keyword is ``name=(tensor, "B T H K")``; an axis name stands for one size in all tensors, in ``known`` too.
    ``"B T H | B T H V"`` allows either rank. ``None`` tensors are skipped.
    """
    sizes: dict[str, int] = dict(known) if known else {}
    for name, (tensor, spec) in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            check_tensor(name, tensor)
        shape = tensor.shape
        axes = _layouts(spec).get(len(shape))
        good = axes is not None
        if axes is not None:
            for axis, size in zip(axes, shape, strict=True):
                if sizes.setdefault(axis, size) != size:
                    good = False
        if not good:
            sources: dict[str, str] = {}
            before: dict[str, int] = dict(known) if known else {}
            for other, (earlier, layout) in tensors.items():
                if other == name:
                    break
                if earlier is not None:
                    for axis, size in zip(_layouts(layout)[earlier.dim()], earlier.shape, strict=True):
                        if axis not in before:
                            before[axis] = size
                            sources[axis] = f"`{other}`"
            raise _shape_error(name, tensor, spec, before, sources)
    return sizes


def check_same_dtype(**tensors: Tensor) -> torch.dtype:
    """Check that all tensors share one floating dtype (float16, bfloat16, float32, float64) and return it."""
    dtype: torch.dtype | None = None
    for name, tensor in tensors.items():
        given = tensor.dtype
        if dtype is None:
            dtype = given
            if given not in FLOATS:
                raise DtypeError(f"`{name}` must be float16, bfloat16, float32 or float64, got {given}.")
        elif given is not dtype:
            names = ", ".join(f"`{n}`" for n in tensors)
            found = ", ".join(f"{n} {t.dtype}" for n, t in tensors.items())
            raise DtypeError(f"{names} must share one floating dtype, got {found}.")
    assert dtype is not None
    return dtype


def check_floating(**tensors: Tensor | None) -> None:
    """Check that every given tensor has some floating dtype; ``None`` is skipped."""
    for name, tensor in tensors.items():
        if tensor is not None:
            if not isinstance(tensor, Tensor):
                check_tensor(name, tensor)
            if tensor.dtype not in FLOATS:
                raise DtypeError(f"`{name}` must be float16, bfloat16, float32 or float64, got {tensor.dtype}.")


def check_same_device(**tensors: Tensor | None) -> None:
    """Check that all given tensors live on one device; ``None`` is skipped."""
    device: torch.device | None = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            check_tensor(name, tensor)
        if device is None:
            device = tensor.device
        elif tensor.device != device:
            found = ", ".join(f"{n} on {t.device}" for n, t in tensors.items() if t is not None)
            raise ArgumentError(f"All tensors must be on one device, got {found}.")


def check_heads(H: int, HV: int) -> None:
    """Check that ``HV`` value heads divide into ``H`` groups (grouped value attention)."""
    if HV != H and (H == 0 or HV % H):
        raise ArgumentError(
            f"The number of value heads must be a multiple of the number of query heads, got HV = {HV}, H = {H}."
        )


def check_numel(name: str, tensor: Tensor | None, numel: int, meaning: str) -> None:
    """Check the number of elements of a per-head parameter such as ``A_log`` (any shape)."""
    if tensor is not None:
        check_tensor(name, tensor)
        if tensor.numel() != numel:
            raise ArgumentError(f"`{name}` must have {numel} elements ({meaning}), got {_given(tensor)}.")


def check_writable(name: str, tensor: Tensor) -> None:
    """Check that every element of a tensor that is written to has memory of its own."""
    if any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ArgumentError(
            f"`{name}` is written to, but its elements share memory, as those of an expanded tensor do, got "
            f"{_given(tensor)} with strides {list(tensor.stride())}: pass a tensor of its own, such as a clone()."
        )


def check_choice(name: str, value: Any, allowed: Collection[Any]) -> None:
    """Check that ``value`` is one of ``allowed``."""
    if value not in allowed:
        options = sorted(allowed)
        if len(options) == 2:
            wanted = f"either {options[0]} or {options[1]}"
        else:
            wanted = ", ".join(map(str, options[:-1])) + f" or {options[-1]}" if len(options) > 1 else str(options[0])
        raise ArgumentError(f"`{name}` must be {wanted}, got {value!r}.")


def check_chunk_size(value: Any, allowed: Collection[int]) -> None:
    """Check ``chunk_size`` (an int, not a bool) against the sizes of the op."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise DtypeError(f"`chunk_size` must be an int, got {value!r}.")
    check_choice("chunk_size", value, allowed)


def check_power_of_two(name: str, value: Any) -> None:
    """Check a positive int whose only prime factor is 2."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or value & (value - 1):
        raise ArgumentError(f"`{name}` must be a power of two, got {value!r}.")


def check_scale(scale: Any, K: int) -> None:
    """Check that ``scale`` is ``None`` (for ``K ** -0.5``) or a plain number."""
    if scale is None and K == 0:
        raise ArgumentError("`scale` must be given when q and k have no channels: its default is K ** -0.5.")
    if scale is not None and not isinstance(scale, (int, float, torch.SymFloat)):
        raise DtypeError(f"`scale` must be a number or None, got {type(scale).__name__}.")


def check_no_cp(cp_context: Any) -> None:
    """Reject a context-parallel context, which no op here computes yet."""
    if cp_context is not None:
        raise NotImplementedError("`cp_context` is not supported yet: run the op without context parallelism.")


def _check_state_count(name: str, state: Tensor, N: int) -> None:
    if state.dim() == 0 or state.shape[0] != N:
        raise ArgumentError(
            f"The number of initial states is expected to be equal to the number of sequences, {N}, "
            f"got `{name}` with {_given(state)}."
        )


def check_state(name: str, state: Tensor | None, N: int, H: int, K: int, V: int, state_v_first: bool = False) -> None:
    """Check an initial state ``[N, H, K, V]``, or ``[N, H, V, K]`` with ``state_v_first``; any floating dtype."""
    if state is None:
        return
    check_floating(**{name: state})
    shape = tuple(state.shape)
    wanted = (N, H, V, K) if state_v_first else (N, H, K, V)
    if shape == wanted:
        return
    layout = "[N, HV, V, K]" if state_v_first else "[N, HV, K, V]"
    hint = ""
    _check_state_count(name, state, N)
    if shape == (N, H, K, V) or shape == (N, H, V, K):
        hint = (
            f" This looks like the other layout: pass state_v_first={not state_v_first} or transpose the last two axes."
        )
    raise ArgumentError(f"`{name}` must have shape {layout} = {list(wanted)}, got {list(shape)}.{hint}")


def _readable(tensor: Tensor) -> bool:
    """Whether looking at values is allowed here; see the module docstring."""
    # Fake and wrapper tensors have no values to read.
    if type(tensor) not in (Tensor, torch.nn.Parameter) or torch.compiler.is_compiling():
        return False
    device = tensor.device.type
    if device == "cpu":
        return True
    if device == "meta":
        return False
    from fla import settings

    if not settings.get("FLA_CHECK_INPUTS"):
        return False
    return not (device == "cuda" and torch.cuda.is_current_stream_capturing())


def _check_offsets(name: str, offsets: Sequence[int], T: int, allow_uncovered: bool) -> None:
    if offsets[0] != 0:
        raise ArgumentError(f"`{name}` must start at 0, got {offsets[0]}.")
    ordered = sorted(offsets)
    if ordered != list(offsets):
        at = next(i for i in range(len(offsets) - 1) if offsets[i + 1] < offsets[i])
        raise ArgumentError(
            f"`{name}` must not decrease, got {offsets[at]} followed by {offsets[at + 1]} at index {at + 1}."
        )
    if offsets[-1] > T or (offsets[-1] < T and not allow_uncovered):
        raise ArgumentError(f"`{name}` must end at the number of tokens, T = {T}, got {offsets[-1]}.")


def check_varlen(
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    B: int,
    T: int,
    initial_state: Tensor | None = None,
    *,
    device: torch.device | None = None,
    allow_uncovered: bool = False,
) -> int:
    """Check sequence offsets of packed inputs and return the number of sequences ``N`` (``B`` without offsets).

    Args:
        cu_seqlens: offsets ``[N + 1]``, int32 or int64, on the device of the inputs.
        cu_seqlens_cpu: the same offsets on the CPU, or None.
        B: batch size of the inputs; must be 1 with offsets.
        T: number of tokens, where the last offset must be.
        initial_state: states whose first axis must be ``N``.
        device: device of the inputs, to compare that of ``cu_seqlens`` with.
        allow_uncovered: let the offsets end before ``T`` (graph mode, where the rest of the output is zero).
    """
    if cu_seqlens is None:
        if cu_seqlens_cpu is not None:
            raise ArgumentError("`cu_seqlens_cpu` was given without `cu_seqlens`, which it is a copy of.")
        N = B
    else:
        for name, offsets in (("cu_seqlens", cu_seqlens), ("cu_seqlens_cpu", cu_seqlens_cpu)):
            if offsets is None:
                continue
            check_tensor(name, offsets)
            if offsets.dtype not in _INDEX_DTYPES:
                raise DtypeError(f"`{name}` must be int32 or int64, got {offsets.dtype}.")
            if offsets.dim() != 1 or offsets.shape[0] < 2:
                raise ArgumentError(f"`{name}` must be 1-D with at least two entries, got {_given(offsets)}.")
        if device is not None and cu_seqlens.device != device:
            raise ArgumentError(f"`cu_seqlens` must be on the device of the inputs, {device}, got {cu_seqlens.device}.")
        if B != 1:
            raise ArgumentError(
                f"The batch size is expected to be 1 rather than {B} when using `cu_seqlens`: "
                "flatten the sequences into one row of tokens."
            )
        N = cu_seqlens.shape[0] - 1
        read: list[int] | None = None
        if _readable(cu_seqlens):
            read = cu_seqlens.tolist()
            _check_offsets("cu_seqlens", read, T, allow_uncovered)
        if cu_seqlens_cpu is not None:
            if cu_seqlens_cpu.device.type not in ("cpu", "meta"):
                raise ArgumentError(f"`cu_seqlens_cpu` must be on the CPU, got {cu_seqlens_cpu.device}.")
            if cu_seqlens_cpu.shape[0] != N + 1:
                raise ArgumentError(
                    f"`cu_seqlens_cpu` must be a copy of `cu_seqlens` with {N + 1} entries, "
                    f"got {cu_seqlens_cpu.shape[0]}."
                )
            if _readable(cu_seqlens_cpu):
                copy = cu_seqlens_cpu.tolist()
                _check_offsets("cu_seqlens_cpu", copy, T, allow_uncovered)
                if read is not None and read != copy:
                    raise ArgumentError(
                        "`cu_seqlens_cpu` must hold the same offsets as `cu_seqlens`, got different ones."
                    )
    if initial_state is not None:
        check_tensor("initial_state", initial_state)
        _check_state_count("initial_state", initial_state, N)
    return N
