# SPDX-License-Identifier: MIT
"""Cheap launches: what Triton works out about a call is worked out once per signature.

A Triton launch binds, specialises and looks up some forty arguments, which takes longer than a short kernel runs. The
second launch of a signature goes straight to the compiled kernel.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fla.ops._common import tape
from fla.ops._common.ahead import submit, wait
from fla.ops._common.audit import audit
from fla.ops._common.bound import Matrix, bind, hooks, plain

# Functions that Triton has hashed after what they call.
_hashed: set[int] = set()


def hash_from_below(fn: Any) -> None:
    """Have Triton hash what ``fn`` calls, then ``fn``.

    Triton (3.6, 3.7) leaves the constants of a callee that it has not hashed yet out of the hash of its caller. A
    kernel's key in the cache on disk would depend on what the process has launched before, and a cache that another
    process has filled would be missed.
    """
    # Asked of the class: asking the function would hash it.
    if id(fn) in _hashed or not hasattr(type(fn), "cache_key"):
        return
    _hashed.add(id(fn))
    for name in fn.fn.__code__.co_names:
        hash_from_below(fn.fn.__globals__.get(name))
    _ = fn.cache_key


class Launcher:
    """Launches one jit function.

    The positional arguments are those before the first constexpr; ``meta`` names all constexprs in the order of the
    signature. Kernels launched this way must not specialise on integers (``do_not_specialize``), since those are not
    part of the signature here.
    """

    # Off while kernels are compiled for several chips in one process.
    remember = True

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self.names = tuple(p.name for p in getattr(fn, "params", ()) if p.is_constexpr)
        self._fixed: dict[Any, Fixed] = {}

    def fix(self, meta: dict[str, Any], options: dict[str, Any]) -> Fixed:
        """The launcher of one configuration: what a caller keeps that launches it more than once."""
        key = (*meta.values(), *options.values())
        fixed = self._fixed.get(key)
        if fixed is None:
            if self.names and self.names != tuple(meta):
                raise TypeError(f"{self.fn.__name__} takes the constexprs {self.names}, got {tuple(meta)}")
            fixed = self._fixed[key] = Fixed(self.fn, meta, options)
        return fixed

    def __call__(
        self,
        grid: int,
        args: tuple[Any, ...],
        meta: dict[str, Any],
        options: dict[str, Any],
        given: tuple[Tensor | None, ...] | None = None,
    ) -> None:
        """Launch ``grid`` programs.

        ``given`` are the arguments that the caller of the op chose, whose dtypes and alignment vary; what the engine
        allocates itself is aligned and typed by them and by ``meta``. If None, all tensors among ``args`` are looked
        at.
        """
        if grid > 0:
            self.fix(meta, options)(
                grid, args, tuple(a for a in args if isinstance(a, Tensor)) if given is None else given
            )


class Fixed:
    """Launches one configuration of a kernel; see `Launcher`."""

    __slots__ = ("_ahead", "_compiled", "_gluon", "fn", "meta", "options")

    def __init__(self, fn: Any, meta: dict[str, Any], options: dict[str, Any]) -> None:
        self.fn, self.meta, self.options = fn, meta, options
        hash_from_below(fn)
        self._gluon = bool(getattr(fn, "is_gluon", bool)())
        self._compiled: dict[Any, Any] = {}
        self._ahead: dict[Any, Any] = {}

    def __call__(self, grid: int, args: tuple[Any, ...], given: tuple[Tensor | None, ...]) -> None:
        if grid <= 0:
            return
        key: list[Any] = []
        bits = 0
        for x in given:
            if x is None:
                key.append(None)
            else:
                key.append(x.dtype)
                bits |= x.data_ptr()
        # Any of the tensors tells the device; misaligned ones compile to other kernels, which Triton sorts out.
        device = args[0].get_device()
        key.append(device)
        signature = tuple(key)
        if bits & 15:
            if tape.recording is not None:
                tape.note_launch(grid, args, None)
            audit(self.fn[(grid,)](*plain(args, self._gluon), **self.meta, **self.options))
            return
        known = self._compiled.get(signature)
        if tape.recording is not None:
            tape.note_launch(grid, args, known)
        if known is not None:
            kernel, go, listening, stream = known
            if go is None or listening():
                kernel[grid, 1, 1](*plain(args), *self.meta.values())
            else:
                go(grid, stream(device), args)
            return
        if args[0].is_meta:
            if signature not in self._ahead:
                self._ahead[signature] = submit(self.fn, plain(args, self._gluon), {**self.meta, **self.options})
            return
        if self._ahead:
            coming = self._ahead.pop((*key[:-1], -1), None)
            if coming is not None:
                wait(coming)
        kernel = self.fn[(grid,)](*plain(args, self._gluon), **self.meta, **self.options)
        audit(kernel)
        # The interpreter returns nothing.
        if kernel is not None and Launcher.remember:
            self._compiled[signature] = (kernel, bind(kernel, args, tuple(self.meta.values())), *_surroundings())


@functools.lru_cache(maxsize=1)
def _surroundings() -> tuple[Any, Any]:
    """Whether somebody listens to launches, and the current stream of a device."""
    from triton.runtime import driver

    return hooks(), driver.active.get_current_stream


def descriptor(x: Tensor, rows: int, cols: int, block_rows: int, block_cols: int) -> Matrix:
    """``x`` as a row-major `[rows, cols]` matrix that the kernel reads by tensor descriptor."""
    return Matrix((x, rows, cols, block_rows, block_cols))


# What `on_device` returns where the current device is right: nothing to enter.
HERE = contextlib.nullcontext()
# Without torch's question whether CUDA is there: a tensor on it says so.
_capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device.

    It also needs the device's context bound to this thread before it can make a descriptor, which autograd's threads
    lack until the first CUDA call; asking for the capture state is one, and allowed under capture.
    """
    if x.is_cuda:
        _capturing()
        if x.get_device() != _current_device():
            return torch.cuda.device(x.device)
    return HERE


def aligned(x: Tensor) -> Tensor:
    """Contiguous and on a 16-byte boundary, which descriptors need; a contiguous view may begin anywhere. A view
    with the negative bit is written out."""
    x = x.contiguous().resolve_neg()
    return x.clone() if x.data_ptr() & 15 else x
