# SPDX-License-Identifier: MIT
"""A compiled kernel bound to Triton's C launcher.

Triton's Python layers walk over all arguments at every launch, ask the driver about every pointer and encode every
tensor descriptor afresh. What they hand to C in the end is looked at once per kernel, and a function is written that
calls C with the same things: addresses as integers, descriptors encoded once per matrix.

Nothing here depends on the version of Triton but the shape of its launcher: an object with an attribute ``launch``. A
launcher of another shape is left alone, and Triton launches by its own means.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

# Kept per descriptor of a kernel: one for each buffer of a training step, over a few lengths.
_MAPS_AT_MOST = 512


class Matrix(tuple[Any, int, int, int, int]):
    """A row-major `[rows, cols]` matrix that a kernel reads by descriptor: (tensor, rows, cols, block)."""

    __slots__ = ()

    def descriptor(self, gluon: bool = False) -> Any:
        """Triton's object for it, or Gluon's with the usual layout of such a block.

        Made without the checks of its constructor: policies use descriptors only for contiguous tensors with rows of a
        multiple of 16 bytes.
        """
        x, rows, cols, block_rows, block_cols = self
        d = _blank(gluon)
        d.base, d.shape, d.strides, d.block_shape = x, [rows, cols], [cols, 1], [block_rows, block_cols]
        if gluon:
            d.layout = _layout(block_rows, block_cols, x.element_size())
        for name, value in (("padding", "zero"), ("round_f32_to_tf32", False)):
            if not hasattr(d, name):
                setattr(d, name, value)
        return d


def _blank(gluon: bool) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    if gluon:
        from triton.experimental.gluon.nvidia import hopper

        return hopper.TensorDescriptor.__new__(hopper.TensorDescriptor)
    return TensorDescriptor.__new__(TensorDescriptor)


@functools.lru_cache(maxsize=64)
def _layout(rows: int, cols: int, size: int) -> Any:
    """How a block lies in shared memory: swizzled over rows of 128 or 64 bytes, or plain where it has fewer than 8
    rows."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    wide = 0 if rows < 8 else 128 if cols * size % 128 == 0 else 64 if cols * size % 64 == 0 else 0
    return NVMMASharedLayout(swizzle_byte_width=wide, element_bitwidth=8 * size, rank=2)


def plain(args: Sequence[Any], gluon: bool = False) -> tuple[Any, ...]:
    """Arguments as Triton takes them."""
    return tuple(a.descriptor(gluon) if type(a) is Matrix else a for a in args)


class _Unknown(Exception):
    """The launcher is not of the shape that is known."""


def _with_launch(launch: Any, take: Callable[..., None]) -> tuple[Any, Any]:
    """``launch`` calling ``take`` where it would call into C, and what it would have called."""
    if isinstance(launch, types.BuiltinFunctionType):
        return take, launch
    if not isinstance(launch, types.FunctionType):
        raise _Unknown
    cells, found = [], None
    for cell in launch.__closure__ or ():
        inner = cell.cell_contents
        if callable(inner) and not isinstance(inner, type):
            if found is not None:
                raise _Unknown
            inner, found = _with_launch(inner, take)
        cells.append(types.CellType(inner))
    if found is None:
        raise _Unknown
    copied = types.FunctionType(launch.__code__, launch.__globals__, launch.__name__, launch.__defaults__, tuple(cells))
    return copied, found


class _Sentinel:
    __slots__ = ()


def _is_map(x: Any) -> bool:
    return type(x).__name__ == "PyCUtensorMap"


def hooks() -> Callable[[], bool]:
    """Whether somebody listens to launches (a profiler): then Triton launches by its own means."""
    try:
        from triton import knobs

        runtime: Any = knobs.runtime
        runtime.launch_enter_hook, runtime.launch_exit_hook  # noqa: B018  (are they there?)
    except (ImportError, AttributeError):
        from triton.compiler import CompiledKernel

        runtime = CompiledKernel

    def listening() -> bool:
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        return (enter is not None and bool(getattr(enter, "calls", True))) or (
            leave is not None and bool(getattr(leave, "calls", True))
        )

    # For functions that are written out: where the hooks are, and both, if an empty list in each says that nobody is.
    chains = runtime.launch_enter_hook, runtime.launch_exit_hook
    if all(type(getattr(chain, "calls", None)) is list for chain in chains):
        listening.parts = (runtime, *chains)  # type: ignore[attr-defined]
    return listening


class Recorder:
    """What a compiled kernel's launcher hands to C."""

    def __init__(self, kernel: Any, values: tuple[Any, ...]) -> None:
        run = kernel.run
        if not hasattr(run, "launch") or not hasattr(run, "__dict__"):
            raise _Unknown
        for scratch in ("global_scratch_size", "profile_scratch_size"):
            if getattr(run, scratch, 0):
                raise _Unknown
        self._taken: list[tuple[Any, ...]] = []
        self._run = copy.copy(run)
        self._run.launch, self.launch = _with_launch(run.launch, lambda *final: self._taken.append(final))
        self._fixed = (kernel.function, kernel.packed_metadata, None, None, None)
        self._values = values

    def __call__(self, grid: Any, stream: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self._taken.clear()
        self._run(grid, 1, 1, stream, *self._fixed, *args, *self._values)
        if len(self._taken) != 1:
            raise _Unknown
        return self._taken.pop()


def _flat(x: tuple[Any, ...]) -> list[Any]:
    """Positional arguments, those in tuples and lists among them included."""
    out: list[Any] = []
    for e in x:
        out += _flat(tuple(e)) if isinstance(e, (tuple, list)) else [e]
    return out


def _encoders(launch: Any, matrices: list[Matrix]) -> list[Callable[[Matrix], tuple[Any, ...]]] | None:
    """Functions that encode one descriptor each, or None where Triton's own is not found."""
    if not isinstance(launch, types.FunctionType):
        return None
    make = launch.__globals__.get("make_tensordesc_arg")
    cells = dict(zip(launch.__code__.co_freevars, launch.__closure__ or (), strict=True))
    if make is None or "tensordesc_meta" not in cells:
        return None

    def encoder(meta: Any) -> Callable[[Matrix], tuple[Any, ...]]:
        return lambda m: tuple(make(m.descriptor(), meta))

    found = [encoder(meta) for meta in cells["tensordesc_meta"].cell_contents]
    if len(found) != len(matrices):
        return None
    for encode, m in zip(found, matrices, strict=True):
        x, *numbers = encode(m)
        if not _is_map(x) or numbers != [m[1], m[2], m[2], 1]:
            return None
    return found


def bind(kernel: Any, args: tuple[Any, ...], values: tuple[Any, ...]) -> Callable[..., None] | None:
    """A function ``(grid, stream, args)`` that launches ``kernel``, or None where its launcher is not understood.

    ``args`` are those of a launch: which are tensors, matrices, None or numbers holds for all launches by the result.
    ``values`` are the constexprs.
    """
    try:
        return _bind(kernel, args, values)
    except Exception:
        # Whatever a launcher of another kind does with stand-ins for its arguments: it is not for us.
        return None


def _bind(kernel: Any, args: tuple[Any, ...], values: tuple[Any, ...]) -> Callable[..., None]:
    recorder = Recorder(kernel, values)
    grid, stream = _Sentinel(), _Sentinel()
    stand_ins = tuple(a.descriptor() if type(a) is Matrix else _Sentinel() for a in args)
    final = recorder(grid, stream, stand_ins)
    place = {id(s): j for j, s in enumerate(stand_ins)}
    matrices = [j for j, a in enumerate(args) if type(a) is Matrix]
    names: dict[str, Any] = {"launch": recorder.launch, "miss": None}
    seen: list[int] = []
    seen_too: list[Any] = []

    def text(e: Any, rest: list[Any]) -> list[str]:
        if e is grid or e is stream:
            seen_too.append(e)
            return ["g" if e is grid else "s"]
        if isinstance(e, _Sentinel):
            j = place[id(e)]
            seen.append(j)
            a = args[j]
            return ["None" if a is None else f"x{j}.data_ptr()" if isinstance(a, Tensor) else f"x{j}"]
        if _is_map(e):
            j = matrices[sum(i in matrices for i in seen)]
            _, rows, cols, _, _ = args[j]
            if [rest.pop(0) for _ in range(4)] != [rows, cols, cols, 1]:
                raise _Unknown
            seen.append(j)
            return [f"*m{j}"]
        name = f"c{len(names)}"
        names[name] = e
        return [name]

    def texts(elements: Sequence[Any]) -> list[str]:
        rest, out = list(elements), []
        while rest:
            e = rest.pop(0)
            nested = isinstance(e, (tuple, list)) and any(isinstance(y, _Sentinel) or _is_map(y) for y in e)
            if nested:
                inner = ", ".join(texts(e))
                out.append(f"[{inner}]" if isinstance(e, list) else f"({inner},)")
            else:
                out += text(e, rest)
        return out

    called = ", ".join(texts(final))
    if sorted(seen) != list(range(len(args))) or len(seen_too) != 2:
        raise _Unknown
    caches: dict[int, dict[Any, tuple[Any, ...]]] = {j: {} for j in matrices}

    encode = _encoders(kernel.run.launch, [args[j] for j in matrices])

    def miss(g: int, s: int, x: tuple[Any, ...]) -> None:
        """Launch where some matrix has not been seen."""
        flat: list[Any] = []
        if encode is None:
            final = recorder(g, s, plain(x))
            recorder.launch(*final)
            flat = _flat(final)
            at = [i for i, e in enumerate(flat) if _is_map(e)]
        for n, j in enumerate(matrices):
            cache, y = caches[j], x[j]
            key = (y[0].data_ptr(), y[1], y[2])
            if key not in cache:
                if len(cache) >= _MAPS_AT_MOST:
                    cache.clear()
                cache[key] = tuple(flat[at[n] : at[n] + 5]) if encode is None else encode[n](y)
        if encode is not None:
            go(g, s, x)

    names["miss"] = miss
    lines = ["def go(g, s, x):", f"    {', '.join(f'x{j}' for j in range(len(args)))}, = x"]
    if matrices:
        lines.append("    try:")
        for j in matrices:
            names[f"d{j}"] = caches[j]
            # The blocks of a matrix are fixed by the kernel.
            lines.append(f"        t, r, c, _, _ = x{j}; m{j} = d{j}[t.data_ptr(), r, c]")
        lines += ["    except KeyError:", "        return miss(g, s, x)"]
    lines.append(f"    launch({called})")
    exec("\n".join(lines), names)
    go: Callable[..., None] = names["go"]
    # For `tape`, which writes several launches into one function.
    if encode is not None or not matrices:
        go.parts = called, names, dict(zip(matrices, encode or (), strict=True))  # type: ignore[attr-defined]
    # The functions above refer to each other: until they are collected they would keep the tensors of this call alive.
    args, stand_ins, final = (), (), ()
    return go
