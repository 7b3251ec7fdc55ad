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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from fla.ops._common.bound import Matrix
from fla.ops._common.policy import chip_of

Body = Callable[..., tuple[Tensor | None, ...]]
# Runs of a body before it is left alone for good: the first compiles, the second is watched.
_TRIES = 4
_MAPS_AT_MOST = 512
_CALLS_AT_MOST = 256
# Parts of an allocation begin where the caching allocator would begin a block.
_ALIGN = 512
# Larger buffers are allocated one by one: blocks that big are hard to find again, and their calls take long enough.
_ROOM = 512 << 20
_TOKEN = re.compile(r"\bx(\d+)\.data_ptr\(\)|\bx(\d+)\b|\*m(\d+)|\bc(\d+)\b|\bg\b|\bs\b")
_ALLOCATE = ("aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided")

_PLAIN = frozenset((Tensor, torch.nn.Parameter))

recording: Recording | None = None
_lock = threading.Lock()


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
    """A step that launches a kernel. ``maps`` are descriptors: (name, tensor, lookup, maker)."""

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
        self.names: dict[str, Any] = {"empty": torch.empty_strided, "part": _part, "byte": torch.uint8}
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
            how = f"dtype={self.constant(out.dtype)}, device={self.constant(out.device)}"
            self.make(out, f"empty({tuple(out.shape)}, {out.stride()}, {how})", allocated=True)
            return
        given = [*map(self.value, args), *(f"{name}={self.value(x)}" for name, x in kwargs.items())]
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        how, needs = f"{self.constant(func)}({', '.join(given)})", tuple(map(self.variable, tensors))
        same = len(tensors) == 1 and not func._schema.is_mutable and _storage(out) == _storage(tensors[0])
        if same and out.numel():
            self.make(out, how, needs=needs, root=needs[0], offset=out.data_ptr() - tensors[0].data_ptr())
        else:
            self.make(out, how, needs=needs)

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
        text = f"{self.constant(names['launch'])}({text})"
        self.steps.append(_Launch(text, tuple(pointers), tuple(maps.values())))

    def function(
        self, inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor | None, ...]
    ) -> Callable[..., tuple[Tensor | None, ...] | None]:
        if not self.fit or self.launcher is None:
            raise _Unfit
        self.names["listening"], self.names["stream"] = self.launcher
        results = [None if x is None else self.variable(x) for x in outputs]
        given = [f"i{i}" for i, x in enumerate(inputs) if x is not None]
        source = [
            f"def run(device, {', '.join(f'i{i}' for i in range(len(inputs)))}):",
            *(f"    p_{x} = {x}.data_ptr()" for x in given),
            f"    if ({' | '.join(f'p_{x}' for x in given)}) & 15 or listening():",
            "        return None",
            "    s = stream(device)",
            *(f"    {line}" for line in self._lines(given, {name for name in results if name is not None})),
            f"    return ({', '.join(map(str, results))},)",
        ]
        exec("\n".join(source), self.names)
        run: Callable[..., Any] = self.names["run"]
        return run

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

        def pointer(name: str) -> str:
            if name in pointers:
                return f"p_{name}"
            pointers.add(name)
            if name in places:
                if "room" not in pointers:
                    pointers.add("room")
                    device = self.constant(self.device)
                    lines.append(f"room = empty(({room},), (1,), dtype=byte, device={device})")
                    lines.append("p_room = room.data_ptr()")
                where = f"p_room + {places[name]}"
            else:
                start, root = 0, name
                while root not in tensors and root in self.made and (base := self.made[root].root) is not None:
                    start, root = start + self.made[root].offset, base
                where = f"{name}.data_ptr()" if root == name else f"{pointer(root)} + {start}"
            lines.append(f"p_{name} = {where}")
            return f"p_{name}"

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
            for m, source, get, encoded in step.maps:
                p, whole = pointer(source), source
                if source not in tensors and (place := self._place(source)) is not None:
                    root, start = place
                    if root in places:
                        root, start = "room", start + places[root]
                    x = self.tensors[source]
                    if root != source:
                        whole = f"part({root}, {start}, {x.numel() * x.itemsize}, {self.constant(x.dtype)})"
                lines.append(f"{m} = {get}({p}) or {encoded}({whole})")
            for source in step.pointers:
                pointer(source)
            lines.append(step.text)
        return lines


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _part(room: Tensor, start: int, size: int, dtype: torch.dtype) -> Tensor:
    return room.view(-1).view(torch.uint8)[start : start + size].view(dtype)


class _Watch(TorchDispatchMode):
    def __init__(self, tape: Recording) -> None:
        super().__init__()
        self.tape = tape


def _watch(self: _Watch, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    out = func(*args, **(kwargs or {}))
    _note(self.tape, self.tape.op, func, args, kwargs or {}, out)
    return out


# Not in the class statement: torch wraps what it finds there, and the wrapper imports Dynamo, which takes seconds.
_Watch.__torch_dispatch__ = _watch  # type: ignore[assignment]


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


class Known:
    """A call of known sizes, types and flags, and what is written out of it."""

    __slots__ = ("call", "tapes")

    def __init__(self, call: Any) -> None:
        self.call = call
        self.tapes: dict[Any, Any] = {}

    def run(self, name: Any, body: Body, inputs: tuple[Tensor | None, ...], *static: Any) -> Any:
        """``body(*inputs, call, *static)``; ``name`` says which body, and what varies of ``static`` and None inputs."""
        device = inputs[0].get_device()  # type: ignore[union-attr]
        return replayed(self.tapes, name, device, body, inputs, self.call, *static)


class KnownCalls:
    """Calls by what `look` says of their inputs and by their flags."""

    def __init__(self) -> None:
        self._calls: dict[Any, Known] = {}
        self.get = self._calls.get

    def add(self, key: tuple[Any, ...], call: Any) -> Known:
        """Keep ``call``, unless its inputs, first in the key, were none that can be known, or a flag may change."""
        known = Known(call)
        if key[0] is not None and not any(isinstance(flag, Tensor) for flag in key[1]):
            if len(self._calls) >= _CALLS_AT_MOST:
                self._calls.clear()
            self._calls[key] = known
        return known


_transforming: Callable[[], bool] = torch._C._are_functorch_transforms_active


def _refuse_transforms(inputs: tuple[Tensor | None, ...]) -> None:
    # Not only where an input takes part in the transform: what is allocated inside it does.
    if _transforming():
        raise RuntimeError(
            "The Triton kernels compute no torch.func transforms (vmap, grad, jvp, ...): take gradients with "
            "torch.autograd, or run token by token in PyTorch, a fused_recurrent function under "
            'fla.backends.use_backend("torch").'
        )
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in inputs):
        raise NotImplementedError("The Triton kernels compute no forward-mode derivatives, but an input is a dual.")


def refuse_transforms(inputs: tuple[Tensor | None, ...]) -> None:
    """Raise in a ``torch.func`` transform, and where an input has a forward-mode tangent."""
    if _transforming() or forward_ad._current_level >= 0:
        _refuse_transforms(inputs)


def look(inputs: tuple[Tensor | None, ...]) -> tuple[Any, ...] | None:
    """Whether a gradient is due, the device, and the shape and type of each tensor: what a call is known by.

    None where something is no plain contiguous tensor on a 16-byte boundary. Calls in a ``torch.func`` transform and
    tensors with a forward-mode tangent are refused: kernels would need memory that is not there, or lose the tangent.
    """
    refuse_transforms(inputs)
    grad = False
    bits = 0
    kinds: list[Any] = []
    add = kinds.append
    for x in inputs:
        if x is None:
            add(None)
        elif type(x) in _PLAIN and x.is_contiguous():
            if x.requires_grad:
                grad = True
            bits |= x.data_ptr()
            add(x.shape)
            add(x.dtype)
        else:
            return None
    if bits & 15:
        return None
    first: Any = inputs[0]
    # What chip other devices stand for may change (`describe_chip`).
    where = first.get_device() if first.is_cuda else (first.device, chip_of(first.device))
    return (grad and torch.is_grad_enabled(), where, *kinds)


def taped(tapes: dict[Any, Any], key: Any, body: Body, inputs: tuple[Tensor | None, ...], *static: Any) -> Any:
    """``body(*inputs, *static)``, contiguous tensors or None, which returns a tuple of such.

    ``tapes`` belongs to what says all else about the call, and ``key`` names the body and ``static``. Which inputs are
    None, and the types, devices and alignment of the others, need not be in it.
    """
    device = inputs[0].get_device()  # type: ignore[union-attr]
    signature = (key, device, *[None if x is None else x.dtype for x in inputs])
    return replayed(tapes, signature, device, body, inputs, *static)


def replayed(
    tapes: dict[Any, Any], signature: Any, device: int, body: Body, inputs: tuple[Tensor | None, ...], *static: Any
) -> Any:
    """`taped` where ``signature`` says all but the alignment, types and devices included."""
    found = tapes.get(signature, 0)
    if callable(found):
        result = found(device, *inputs)
        return body(*inputs, *static) if result is None else result
    if found >= _TRIES:
        return body(*inputs, *static)
    return _watched(tapes, signature, found, body, inputs, static)


def _watched(
    tapes: dict[Any, Any], signature: Any, tries: int, body: Body, inputs: tuple[Tensor | None, ...], static: Any
) -> Any:
    """Run a body that is not written out yet, and write it out where it may be."""
    global recording
    given = [x for x in inputs if x is not None]
    # One tensor given twice would be taken for the same one in every later call.
    if any(x.data_ptr() & 15 for x in given) or len(set(map(id, given))) < len(given):
        return body(*inputs, *static)
    tapes[signature] = tries + 1
    if (
        not tries
        or any(type(x) not in _PLAIN for x in given)
        or given[0].is_meta
        or (given[0].is_cuda and torch.cuda.is_current_stream_capturing())
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
            tapes[signature] = tape.function(inputs, result)
        except Exception:
            tapes[signature] = tries + 1
        return result
    finally:
        recording = None
        tape.forget()
        _lock.release()
