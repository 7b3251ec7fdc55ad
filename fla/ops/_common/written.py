# SPDX-License-Identifier: MIT
"""A body that was watched, as source text: these allocations, these launches on them. See `tape`."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fla.ops._common.bound import Matrix

_MAPS_AT_MOST = 512
# Lists of arguments that are kept of a launch: one for each layer of a model, over a few lengths.
_LAUNCHES_AT_MOST = 256
# Parts of an allocation begin where the caching allocator would begin a block.
_ALIGN = 512
# Larger buffers are allocated one by one: blocks that big are hard to find again, and their calls take long enough.
_ROOM = 512 << 20
_TOKEN = re.compile(r"\bx(\d+)\.data_ptr\(\)|\bx(\d+)\b|\*m(\d+)|\bc(\d+)\b|\bg\b|\bs\b")
# New memory is filled, or a dispatch mode sees what is allocated.
_WATCHED = (torch._C._get_deterministic_algorithms, torch._C._len_torch_dispatch_stack)
_ALLOCATE = ("aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided")


class _Unfit(Exception):
    """Something that cannot be written out."""


@dataclass
class _Made:
    """A step that makes a tensor, under a name: an allocation, a view of ``root``, or what an operator returned."""

    name: str
    tensor: Tensor
    how: str  # source text of it, as a tensor
    needs: tuple[str, ...] = ()  # names that are tensors in that text
    root: str | None = None
    offset: int = 0
    allocated: bool = False


@dataclass
class _Launch:
    """A step that launches a kernel: what is called, and the text of its arguments. ``maps`` are descriptors: (name,
    tensor, lookup, maker)."""

    launch: str
    text: str
    pointers: tuple[str, ...]
    maps: tuple[tuple[str, str, str, str], ...] = ()


class Recording:
    """What a body does, as source text.

    Kernels are handed addresses. A buffer that nothing but kernels sees needs no tensor, and neither does a view of
    one: all such buffers of a call are parts of a single allocation.
    """

    def __init__(self, inputs: tuple[Tensor | None, ...]) -> None:
        self.thread = threading.get_ident()
        self.fit = True
        self.known: list[Any] = []  # keeps tensors alive while their identities are in use
        self.variables: dict[int, str] = {}
        self.tensors: dict[str, Tensor] = {}
        self.names: dict[str, Any] = {"part": _part}
        self.steps: list[_Made | _Launch] = []
        self.made: dict[str, _Made] = {}
        self.launcher: tuple[Any, Any] | None = None
        self.device = next(x for x in inputs if x is not None).device
        for i, x in enumerate(inputs):
            if x is not None:
                self.variables[id(x)] = f"i{i}"
                self.tensors[f"i{i}"] = x
                self.known.append(x)

    def forget(self) -> None:
        """Let go of every tensor. Closures hold on to the recording until the next garbage collection."""
        self.fit = False
        for held in (self.known, self.variables, self.tensors, self.steps, self.made):
            held.clear()

    def constant(self, value: Any) -> str:
        name = f"k{len(self.names)}"
        self.names[name] = value
        return name

    def variable(self, x: Tensor) -> str:
        found = self.variables.get(id(x))
        if found is None:  # a tensor from before: a table of constants
            found = self.variables[id(x)] = self.constant(x)
            self.tensors[found] = x
            self.known.append(x)
        return found

    def make(self, x: Tensor, how: str, **more: Any) -> None:
        self.known.append(x)
        name = self.variables[id(x)] = f"t{len(self.known)}"
        self.tensors[name] = x
        step = self.made[name] = _Made(name, x, how, **more)
        self.steps.append(step)

    def op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if not isinstance(out, Tensor):
            raise _Unfit
        if id(out) in self.variables:
            if func._schema.is_mutable or not any(out is a for a in args):
                raise _Unfit
            return
        if func._schema.name == "aten::detach" and (name := self.variable(args[0])) in self.made:
            # What torch.empty does behind its allocation.
            self.known.append(out)
            self.variables[id(out)] = name
            return
        if func._schema.name in _ALLOCATE:
            how = self._empty(tuple(out.shape), out.stride(), out.dtype, out.device)
            self.make(out, how, allocated=True)
            return
        given = [*map(self.value, args), *(f"{name}={self.value(x)}" for name, x in kwargs.items())]
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        how, needs = f"{self.constant(func)}({', '.join(given)})", tuple(map(self.variable, tensors))
        same = len(tensors) == 1 and not func._schema.is_mutable and _storage(out) == _storage(tensors[0])
        if same and out.numel():
            self.make(out, how, needs=needs, root=needs[0], offset=out.data_ptr() - tensors[0].data_ptr())
        else:
            self.make(out, how, needs=needs)

    def _empty(self, size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> str:
        if device == self.device:
            return f"empty({size}, {strides}, {self.constant(dtype)})"
        return f"{self.constant(_any_empty(device))}({size}, {strides}, {self.constant(dtype)})"

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
        n = len(self.steps)
        maps: dict[str, tuple[str, str, str, str]] = {}
        pointers: list[str] = []
        for j, encode in encoders.items():
            x, *rest = args[j]
            cache: dict[int, Any] = {}

            def encoded(x: Tensor, cache: Any = cache, encode: Any = encode, rest: Any = rest) -> Any:
                if len(cache) >= _MAPS_AT_MOST:
                    cache.clear()
                found = cache[x.data_ptr()] = encode(Matrix((x, *rest)))
                return found

            maps[str(j)] = f"m{n}_{j}", self.variable(x), self.constant(cache.get), self.constant(encoded)

        def expression(match: re.Match[str]) -> str:
            tensor, number, matrix, constant = match.groups()
            if tensor is not None:
                pointers.append(self.variable(args[int(tensor)]))
                return f"p_{pointers[-1]}"
            if number is not None:
                return self.constant(args[int(number)])
            if matrix is not None:
                return f"*{maps[matrix][0]}"
            if constant is not None:
                return self.constant(names[match[0]])
            return str(grid) if match[0] == "g" else "s"

        text = _TOKEN.sub(expression, called)
        self.steps.append(_Launch(self.constant(names["launch"]), text, tuple(pointers), tuple(maps.values())))

    def function(
        self, inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor | None, ...]
    ) -> Callable[..., tuple[Tensor | None, ...] | None]:
        if not self.fit or self.launcher is None:
            raise _Unfit
        self.names["listening"], self.names["stream"] = self.launcher
        self.names["empty"], quick = _any_empty(self.device), []
        if (fast := _quick_empty(self.device)) is not None:
            self.names |= {"fast": fast, "careful": self.names.pop("empty")}
            watched = " or ".join(f"{self.constant(ask)}()" for ask in _WATCHED)
            quick = [f"    empty = careful if {watched} else fast"]
        results = [None if x is None else self.variable(x) for x in outputs]
        given = [f"i{i}" for i, x in enumerate(inputs) if x is not None]
        source = [
            f"def run(device, {', '.join(f'i{i}' for i in range(len(inputs)))}):",
            *(f"    p_{x} = {x}.data_ptr()" for x in given),
            f"    if ({' | '.join(f'p_{x}' for x in given)}) & 15:",
            "        return None",
            f"    if {self._listening()} and listening():",
            "        return None",
            "    s = stream(device)",
            *quick,
            *(f"    {line}" for line in self._lines(given, {name for name in results if name is not None})),
            f"    return ({', '.join(map(str, results))},)",
        ]
        exec("\n".join(source), self.names)
        run: Callable[..., Any] = self.names["run"]
        return run

    def _listening(self) -> str:
        """Whether there is reason to ask ``listening``."""
        parts = getattr(self.names["listening"], "parts", None)
        if parts is None:
            return "True"
        names = [self.constant(part) for part in parts]
        hooks = zip(names[1:], ("launch_enter_hook", "launch_exit_hook"), strict=True)
        return "(" + " or ".join(f"{names[0]}.{hook} is not {c} or {c}.calls" for c, hook in hooks) + ")"

    def _tensors(self, seen: set[str]) -> set[str]:
        """The names that must be tensors, ``seen`` from outside among them: what they are made of must be, too."""
        tensors = set(seen)
        for step in reversed(self.steps):
            if isinstance(step, _Launch):
                tensors |= {x for _, x, _, _ in step.maps if self._place(x) is None}
            elif step.name in tensors or not (step.allocated or step.root is not None):
                tensors |= {step.name, *step.needs}
        return tensors

    def _place(self, name: str) -> tuple[str, int] | None:
        """In which buffer or input a tensor lies and where; None where it cannot be cut out of that again."""
        start, root = 0, name
        while root in self.made and (base := self.made[root].root) is not None:
            start, root = start + self.made[root].offset, base
        whole = self.made[root].tensor if root in self.made else self.tensors.get(root)
        if whole is None or not (whole.is_contiguous() and self.tensors[name].is_contiguous()):
            return None
        return root, start

    def _ends(self, seen: set[str]) -> dict[int, list[str]]:
        """The names, by the step before which they can be let go of: those in whose memory nothing lies that a later
        step or the caller sees."""

        def whole(name: str) -> str:
            while name in self.made and (base := self.made[name].root) is not None:
                name = base
            return name

        last: dict[str, int] = {}
        for i, step in enumerate(self.steps):
            used = (step.name, *step.needs) if isinstance(step, _Made) else (*step.pointers, *(x[1] for x in step.maps))
            last.update((whole(name), i) for name in used)
        kept = set(map(whole, seen))
        ends: dict[int, list[str]] = {}
        for name in self.made:
            root = whole(name)
            if root in self.made and root not in kept:
                ends.setdefault(last[root] + 1, []).append(name)
        return ends

    def _lines(self, given: list[str], seen: set[str]) -> list[str]:
        tensors = self._tensors(seen)
        places: dict[str, int] = {}
        room = 0
        for name, made in self.made.items():
            x = made.tensor
            size = -(-x.untyped_storage().nbytes() // _ALIGN) * _ALIGN
            if made.allocated and name not in tensors and x.device == self.device and room + size <= _ROOM:
                places[name] = room
                room += size
        lines: list[str] = []
        written: set[str] = set()
        pointers = set(given)

        def where(name: str) -> tuple[str, int]:
            """The tensor whose address is taken for that of ``name``, and how far behind that it lies."""
            start = 0
            while name not in tensors and name in self.made and (base := self.made[name].root) is not None:
                start, name = start + self.made[name].offset, base
            return ("room", start + places[name]) if name in places else (name, start)

        def address(root: str) -> str:
            if root not in pointers:
                pointers.add(root)
                if root == "room":
                    lines.append(f"room = {self._empty((room,), (1,), torch.uint8, self.device)}")
                lines.append(f"p_{root} = {root}.data_ptr()")
            return f"p_{root}"

        ends = self._ends(seen)
        for i, step in enumerate(self.steps):
            # Memory that nothing reads any more serves what is allocated next, as it would without the tape.
            if done := [x for x in ends.get(i, ()) if x in written]:
                lines.append(f"{' = '.join(done)} = None")
            if isinstance(step, _Made):
                if step.name in tensors or (step.allocated and step.name not in places):
                    lines.append(f"{step.name} = {step.how}")
                    written.add(step.name)
                continue
            lines.append(self._launched(step, where, address, places))
        return lines

    def _launched(
        self, step: _Launch, where: Callable[[str], tuple[str, int]], address: Callable[[str], str],
        places: dict[str, int],
    ) -> str:  # fmt: skip
        """Source text of a launch. Its arguments, descriptors among them, are kept by the addresses they come from."""
        build: list[str] = []
        addresses: dict[str, None] = {"s": None}
        wholes: dict[str, None] = {}

        def pointer(name: str) -> str:
            root, start = where(name)
            addresses[address(root)] = None
            if name != root and (line := f"p_{name} = p_{root} + {start}") not in build:
                build.append(line)
            return f"p_{name}"

        for m, source, get, encoded in step.maps:
            p, whole = pointer(source), source
            if (place := self._place(source)) is not None and where(source)[0] != source:
                source, start = place
                x = self.tensors[whole]
                if source in places:
                    source, start = "room", start + places[source]
                if source != whole:
                    whole = f"part({source}, {start}, {x.numel() * x.itemsize}, {self.constant(x.dtype)})"
            wholes[source] = None
            build.append(f"{m} = {get}({p}) or {encoded}({whole})")
        for source in step.pointers:
            pointer(source)
        given = ", ".join([*addresses, *wholes])
        body = "".join(f"    {line}\n" for line in build)
        space = dict(self.names)
        exec(f"def make({given}):\n{body}    return ({step.text},)", space)
        found, made = map(self.constant, _kept(space["make"], len(addresses)))
        return f"{step.launch}(*({found}(({', '.join(addresses)},)) or {made}({given})))"


def _kept(make: Callable[..., tuple[Any, ...]], n: int) -> tuple[Callable[..., Any], Callable[..., tuple[Any, ...]]]:
    """Where results of ``make`` are found by its first ``n`` arguments, and ``make`` that keeps them there."""
    cache: dict[tuple[int, ...], tuple[Any, ...]] = {}

    def made(*given: Any) -> tuple[Any, ...]:
        if len(cache) >= _LAUNCHES_AT_MOST:
            cache.clear()
        found = cache[given[:n]] = make(*given)
        return found

    return cache.get, made


def _any_empty(device: torch.device) -> Callable[..., Tensor]:
    def empty(size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, strides, dtype=dtype, device=device)

    return empty


def _quick_empty(device: torch.device) -> Callable[..., Tensor] | None:
    """``torch.empty_strided`` on the current device of that type without torch's dispatcher, as compiled code calls it:
    (size, strides, dtype)."""
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    found: Callable[..., Tensor] | None = getattr(guards, f"_empty_strided_{device.type}", None)
    return found


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _part(room: Tensor, start: int, size: int, dtype: torch.dtype) -> Tensor:
    return room.view(-1).view(torch.uint8)[start : start + size].view(dtype)
