# SPDX-License-Identifier: MIT
"""The host side of a call, written out as one function.

What a call of known sizes, types and flags does on the host is always the same: allocate these buffers, launch these
kernels on them. `taped` runs a body, watches it once, and from then on runs a function that does only that. Where
anything cannot be watched (a launcher of an unknown kind, the interpreter) the body runs.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fla.ops._common.bound import Matrix

Body = Callable[..., tuple[Tensor | None, ...]]
# Runs of a body before it is left alone for good: the first compiles, the second is watched.
_TRIES = 4
_MAPS_AT_MOST = 512
_TOKEN = re.compile(r"\bx(\d+)\.data_ptr\(\)|\bx(\d+)\b|\*m(\d+)|\bc(\d+)\b|\bg\b|\bs\b")
_ALLOCATE = ("aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided")

recording: Recording | None = None
_lock = threading.Lock()


class _Unfit(Exception):
    """Something that cannot be written out."""


class Recording:
    """What a body does, as source text."""

    def __init__(self, inputs: tuple[Tensor | None, ...]) -> None:
        self.thread = threading.get_ident()
        self.fit = True
        self.known: list[Any] = []  # keeps tensors alive while their identities are in use
        self.variables: dict[int, str] = {}
        self.pointers: set[str] = set()
        self.names: dict[str, Any] = {"empty": torch.empty, "empty_strided": torch.empty_strided}
        self.lines: list[str] = []
        self.launcher: tuple[Any, Any] | None = None
        self.launches = 0
        for i, x in enumerate(inputs):
            if x is not None:
                self.variables[id(x)] = f"i{i}"
                self.known.append(x)

    def constant(self, value: Any) -> str:
        name = f"k{len(self.names)}"
        self.names[name] = value
        return name

    def variable(self, x: Tensor) -> str:
        found = self.variables.get(id(x))
        if found is None:  # a tensor from before: a table of constants
            found = self.variables[id(x)] = self.constant(x)
            self.known.append(x)
        return found

    def pointer(self, x: Tensor) -> str:
        t = self.variable(x)
        if t not in self.pointers:
            self.pointers.add(t)
            self.lines.append(f"    p_{t} = {t}.data_ptr()")
        return f"p_{t}"

    def fresh(self, x: Tensor) -> str:
        self.known.append(x)
        name = self.variables[id(x)] = f"t{len(self.known)}"
        return name

    def op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if not isinstance(out, Tensor):
            raise _Unfit
        if id(out) in self.variables:
            if func._schema.is_mutable or not any(out is a for a in args):
                raise _Unfit
            return
        if func._schema.name == "aten::detach" and (made := self.variable(args[0])).startswith("t"):
            # What torch.empty does behind its allocation.
            self.known.append(out)
            self.variables[id(out)] = made
            return
        if func._schema.name in _ALLOCATE:
            how = f"dtype={self.constant(out.dtype)}, device={self.constant(out.device)}"
            size = tuple(out.shape)
            made = f"empty({size}, {how})" if out.is_contiguous() else f"empty_strided({size}, {out.stride()}, {how})"
        else:
            given = [*map(self.value, args), *(f"{name}={self.value(x)}" for name, x in kwargs.items())]
            made = f"{self.constant(func)}({', '.join(given)})"
        self.lines.append(f"    {self.fresh(out)} = {made}")

    def value(self, x: Any) -> str:
        if isinstance(x, Tensor):
            return self.variable(x)
        if isinstance(x, (list, tuple)) and any(isinstance(y, Tensor) for y in x):
            raise _Unfit
        return self.constant(x)

    def launch(self, grid: int, args: tuple[Any, ...], known: Any) -> None:
        if known is None or not hasattr(known[1], "parts"):
            raise _Unfit
        _, go, listening, stream = known
        called, names, encoders = go.parts
        self.launcher = listening, stream
        n = self.launches
        self.launches += 1
        here: dict[str, str] = {}
        for j, encode in encoders.items():
            x, *rest = args[j]
            p = self.pointer(x)
            cache: dict[int, Any] = {}
            m = f"m{n}_{j}"

            def make(x: Tensor, cache: Any = cache, encode: Any = encode, rest: Any = rest) -> Any:
                if len(cache) >= _MAPS_AT_MOST:
                    cache.clear()
                found = cache[x.data_ptr()] = encode(Matrix((x, *rest)))
                return found

            get = self.constant(cache.get)
            self.lines.append(f"    {m} = {get}({p}) or {self.constant(make)}({self.variable(x)})")
            here[str(j)] = m

        def expression(match: re.Match[str]) -> str:
            tensor, number, matrix, constant = match.groups()
            if tensor is not None:
                return self.pointer(args[int(tensor)])
            if number is not None:
                return self.constant(args[int(number)])
            if matrix is not None:
                return f"*{here[matrix]}"
            if constant is not None:
                return self.constant(names[match[0]])
            return str(grid) if match[0] == "g" else "s"

        text = _TOKEN.sub(expression, called)
        self.lines.append(f"    {self.constant(names['launch'])}({text})")

    def function(self, inputs: int, outputs: tuple[Tensor | None, ...]) -> Callable[..., Any]:
        if not self.fit or self.launcher is None:
            raise _Unfit
        listening, stream = self.launcher
        self.names.update(listening=listening, stream=stream)
        back = ", ".join("None" if x is None else self.variable(x) for x in outputs)
        source = [
            f"def run(device, {', '.join(f'i{i}' for i in range(inputs))}):",
            "    if listening():",
            "        return None",
            "    s = stream(device)",
            *self.lines,
            f"    return ({back},)",
        ]
        exec("\n".join(source), self.names)
        run: Callable[..., Any] = self.names["run"]
        return run


class _Watch(TorchDispatchMode):
    def __init__(self, tape: Recording) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        _note(self.tape, self.tape.op, func, args, kwargs or {}, out)
        return out


def _note(tape: Recording, what: Callable[..., None], *details: Any) -> None:
    if tape.fit and tape.thread == threading.get_ident():
        try:
            what(*details)
        except Exception:
            tape.fit = False


def note_launch(grid: int, args: tuple[Any, ...], known: Any) -> None:
    """A launch, told by the launcher while a body is watched."""
    tape = recording
    if tape is not None:
        _note(tape, tape.launch, grid, args, known)


def taped(tapes: dict[Any, Any], key: Any, body: Body, inputs: tuple[Tensor | None, ...], *static: Any) -> Any:
    """``body(*inputs, *static)``, contiguous tensors or None, which returns a tuple of such.

    ``tapes`` belongs to what says all else about the call, and ``key`` names the body and ``static``. Which inputs are
    None, and the types, devices and alignment of the others, need not be in it.
    """
    bits = 0
    kinds: list[Any] = [key]
    for x in inputs:
        if x is None:
            kinds.append(None)
        else:
            kinds.append(x.dtype)
            bits |= x.data_ptr()
    device = inputs[0].get_device()  # type: ignore[union-attr]
    kinds.append(device)
    kinds.append(bits & 15)
    signature = tuple(kinds)
    found = tapes.get(signature, 0)
    if callable(found):
        result = found(device, *inputs)
        if result is not None:
            return result
        found = _TRIES
    if found >= _TRIES or bits & 15:
        return body(*inputs, *static)
    return _watched(tapes, signature, found, body, inputs, static)


def _watched(
    tapes: dict[Any, Any], signature: Any, tries: int, body: Body, inputs: tuple[Tensor | None, ...], static: Any
) -> Any:
    """Run a body that is not written out yet, and write it out where it may be."""
    global recording
    tapes[signature] = tries + 1
    first = inputs[0]
    assert first is not None
    if (
        not tries
        or (type(first) is not Tensor and type(first) is not torch.nn.Parameter)
        or first.is_meta
        or (first.is_cuda and torch.cuda.is_current_stream_capturing())
        or not _lock.acquire(blocking=False)
    ):
        return body(*inputs, *static)
    tape = Recording(inputs)
    try:
        recording = tape
        with _Watch(tape):
            result = body(*inputs, *static)
        recording = None
        try:
            tapes[signature] = tape.function(len(inputs), result)
        except Exception:
            tapes[signature] = tries + 1
        return result
    finally:
        recording = None
        _lock.release()
