# SPDX-License-Identifier: MIT
"""`tensor_cache`: remember what a function made of a few tensors.

Meant for index tables made from `cu_seqlens`. An entry holds for the very tensor objects it was made of, as long as
they live and are not written to.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch

R = TypeVar("R", covariant=True)

_PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, Enum)


class CacheInfo(NamedTuple):
    """`bypassed` counts calls that could be neither found nor kept."""

    hits: int
    misses: int
    bypassed: int
    maxsize: int
    currsize: int


class Cached(Protocol[R]):
    """What `tensor_cache` returns."""

    def __call__(self, *args: Any, **kwargs: Any) -> R: ...
    def cache_info(self) -> CacheInfo: ...
    def cache_clear(self) -> None: ...


class _Entry(NamedTuple):
    result: Any
    tensors: tuple[weakref.ref[torch.Tensor], ...]
    """Keep the finalisers of the arguments alive, and prove that an id still means the same object."""
    versions: tuple[int, ...]
    """Of the tensors in the result: a caller may have written into them."""


class _NoKey(Exception):
    """The call cannot be remembered."""


def disabled() -> bool:
    """Whether every `tensor_cache` is off: by the setting, or by `fla.utils.FLA_DISABLE_TENSOR_CACHE = True`."""
    import fla.utils
    from fla import settings

    # A False there decides nothing: it is what pytest's monkeypatch leaves behind.
    return bool(vars(fla.utils).get("FLA_DISABLE_TENSOR_CACHE")) or bool(settings.get("FLA_DISABLE_TENSOR_CACHE"))


def _maxsize() -> int:
    from fla import settings

    return int(settings.get("FLA_TENSOR_CACHE_SIZE"))


def _key(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if value.is_inference():
            raise _NoKey  # counts no versions: a write would go unseen
        if value.requires_grad and torch.is_grad_enabled():
            raise _NoKey  # the result hangs on a graph that one backward frees
        tensors.append(value)
        return id(value), value._version
    if isinstance(value, (tuple, list)):
        return type(value), tuple(_key(v, tensors) for v in value)
    if isinstance(value, _PLAIN):
        return type(value), value
    raise _NoKey


def _surroundings(tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    # A result made on one stream is not ready on another, and one made in inference mode cannot enter autograd.
    device = next((t.device for t in tensors if t.is_cuda), None)
    stream = None if device is None else torch.cuda.current_stream(device).cuda_stream
    return torch.is_inference_mode_enabled(), stream


def _result_versions(result: Any) -> tuple[int, ...]:
    parts = result if isinstance(result, (tuple, list)) else (result,)
    return tuple(p._version for p in parts if isinstance(p, torch.Tensor) and not p.is_inference())


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def tensor_cache(fn: Callable[..., R]) -> Cached[R]:
    """Remember the last results of `fn`, `FLA_TENSOR_CACHE_SIZE` (4) of them.

    A call is found again when every tensor is the same object and has not been written to, and every other argument is
    equal and of the same type. Arguments are held weakly. Safe across threads and CUDA streams. The result is the
    object returned before; if a caller wrote into it, it is made anew.

    Not remembered: calls with tensors made in inference mode (they count no writes) or that need a gradient, with
    arguments of other kinds, while a CUDA graph is captured (what was remembered before the capture is found, and then
    kept for the graph until `cache_clear`), and everything under `FLA_DISABLE_TENSOR_CACHE=1`. Writes through `.data`
    or numpy are invisible to torch and to this.
    Under `torch.compile` the function itself is traced.
    """
    entries: OrderedDict[Any, _Entry] = OrderedDict()
    pinned: list[_Entry] = []
    counts = {"hits": 0, "misses": 0, "bypassed": 0}
    # Re-entrant: collecting an argument may run a finaliser while this thread holds the lock.
    lock = threading.RLock()

    def forget(key: Any) -> None:
        with lock:
            entries.pop(key, None)

    def find(key: Any, capturing: bool) -> _Entry | None:
        with lock:
            entry = entries.get(key)
            if entry is None or any(r() is None for r in entry.tensors):
                return None
            if entry.versions != _result_versions(entry.result):
                del entries[key]
                return None
            entries.move_to_end(key)
            if capturing and all(p is not entry for p in pinned):
                pinned.append(entry)  # the graph reads this memory at every replay
            counts["hits"] += 1
            return entry

    def keep(key: Any, tensors: list[torch.Tensor], result: Any) -> None:
        def gone(_: Any) -> None:
            forget(key)

        refs = tuple(weakref.ref(t, gone) for t in tensors)
        with lock:
            entries[key] = _Entry(result, refs, _result_versions(result))
            entries.move_to_end(key)
            while len(entries) > _maxsize():
                entries.popitem(last=False)

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> R:
        if torch.compiler.is_compiling():
            return fn(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        try:
            if disabled():
                raise _NoKey
            key = (
                tuple(_key(a, tensors) for a in args),
                tuple((n, _key(kwargs[n], tensors)) for n in sorted(kwargs)),
                _surroundings(tensors),
            )
        except _NoKey:
            with lock:
                counts["bypassed"] += 1
            return fn(*args, **kwargs)
        capturing = bool(tensors) and tensors[0].is_cuda and _capturing()
        entry = find(key, capturing)
        if entry is not None:
            return entry.result
        result = fn(*args, **kwargs)
        with lock:
            counts["misses"] += 1
        if not capturing:
            keep(key, tensors, result)
        return result

    def cache_info() -> CacheInfo:
        with lock:
            return CacheInfo(**counts, maxsize=_maxsize(), currsize=len(entries))

    def cache_clear() -> None:
        with lock:
            entries.clear()
            pinned.clear()
            counts.update(hits=0, misses=0, bypassed=0)

    wrapper.cache_info = cache_info  # type: ignore[attr-defined]
    wrapper.cache_clear = cache_clear  # type: ignore[attr-defined]
    return cast("Cached[R]", wrapper)
