# SPDX-License-Identifier: MIT
"""Compile the kernels of a call side by side, before the call comes to them.

``with ahead(device): ...`` runs the host side of a call, forward and backward, on meta tensors: nothing is launched,
and every kernel that would be is compiled in a thread of its own. A launch of such a kernel waits for its thread.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

_state = threading.local()


def standing_for() -> torch.device | None:
    """The device whose tensors meta tensors stand for in this thread."""
    device: torch.device | None = getattr(_state, "device", None)
    return device


@functools.lru_cache(maxsize=1)
def possible() -> bool:
    """Whether Triton compiles in several threads at once: since 3.5, which has means of its own for it."""
    try:
        return importlib.util.find_spec("triton.runtime._async_compile") is not None and (os.cpu_count() or 1) > 1
    except (ImportError, ValueError):
        return False


@contextlib.contextmanager
def ahead(device: torch.device) -> Iterator[None]:
    """See the module's text."""
    _state.device = device
    try:
        yield
    finally:
        _state.device = None


@functools.lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), "fla-compile")


def submit(fn: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Future[Any]:
    """Compile ``fn`` for these arguments and load it on the device that the meta tensors among them stand for."""
    device = standing_for()

    def compile_and_load() -> None:
        if device is not None and device.type == "cuda":
            torch.cuda.set_device(device)
        kernel = fn.warmup(*args, grid=(1,), **keywords)
        load = getattr(kernel, "_init_handles", None)
        if load is not None:
            load()

    return _pool().submit(compile_and_load)


def wait(future: Future[Any]) -> None:
    """Wait for a kernel. What went wrong with it is left to the launch that follows, which says so where it belongs."""
    future.exception()
