# SPDX-License-Identifier: MIT
"""The host side of a call, written out as one function.

What a call of known sizes, types and flags does on the host is always the same: allocate these buffers, launch these
kernels on them. `taped` runs a body, watches it once, and from then on runs a function that does only that. Where
anything cannot be watched (a launcher of an unknown kind, the interpreter) the body runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from fla.ops._common.policy import chip_of
from fla.ops._common.written import Recording

Body = Callable[..., tuple[Tensor | None, ...]]
# Runs of a body before it is left alone for good: the first compiles, the second is watched.
_TRIES = 4
_CALLS_AT_MOST = 256

_PLAIN = frozenset((Tensor, torch.nn.Parameter))

recording: Recording | None = None
_lock = threading.Lock()


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

    __slots__ = ("_given", "call", "places", "tapes")

    def __init__(self, call: Any) -> None:
        self.call = call
        self.tapes: dict[Any, Any] = {}
        self.places: tuple[int, ...] = ()
        self._given: Any = None

    def given(self, row: tuple[Any, ...]) -> tuple[Any, ...]:
        """Those inputs that are there, but for the last one, which has no gradient; or what stands in their places."""
        if self._given is None:
            self.places = tuple(i for i, x in enumerate(row[:-1]) if x is not None)
            self._given = itemgetter(*self.places)
        found: tuple[Any, ...] = self._given(row)
        return found

    def run(self, name: Any, body: Body, inputs: tuple[Tensor | None, ...], *static: Any) -> Any:
        """``body(*inputs, call, *static)``; ``name`` says which body, and what varies of ``static`` and None inputs."""
        device = inputs[0].get_device()  # type: ignore[union-attr]
        return replayed(self.tapes, name, device, body, inputs, self.call, *static)

    def first(self, name: Any, inputs: tuple[Tensor | None, ...]) -> Any:
        """What `run` returns, where that is written out; else None, and nothing was done.

        Gradients may be on here: an autograd function's kernels can run before torch has made its node.
        """
        written = self.tapes.get(name)
        if not callable(written) or _transforming():
            return None
        before = torch.is_grad_enabled()
        _grad_mode(False)
        try:
            return written(inputs[0].get_device(), *inputs)  # type: ignore[union-attr]
        finally:
            _grad_mode(before)


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


# What torch.no_grad calls, without its object.
_grad_mode: Callable[[bool], Any] = torch._C._set_grad_enabled
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
