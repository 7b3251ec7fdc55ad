# SPDX-License-Identifier: MIT
"""Compiled programs, one for each set of compile-time choices, kept for the life of the process (and by tilelang on
disk)."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

#: The only architecture that these programs are written for.
TARGET = {"kind": "cuda", "arch": "sm_90a"}
NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
#: What the first stage writes. float16 has no room for states and what follows from them, so there it is bfloat16 too.
TILE = torch.bfloat16
#: tilelang waits for nvcc without end unless this variable, in seconds, says otherwise. A program takes it 4 to 9.
PATIENCE, SECONDS = "TILELANG_COMPILE_TIMEOUT_SECONDS", "300"
#: Characters of what nvcc said that an error keeps: tilelang puts the whole source of a program before it.
SHOWN = 2000

_building = threading.Lock()


def _renew() -> None:
    # In a forked child the lock may be held by a thread that is not there.
    global _building
    _building = threading.Lock()


os.register_at_fork(after_in_child=_renew)


class BuildError(RuntimeError):
    """A program was not built."""


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    if os.environ.get(PATIENCE):
        yield
        return
    os.environ[PATIENCE] = SECONDS
    try:
        yield
    finally:
        os.environ.pop(PATIENCE, None)


@functools.cache
def program(module: str, name: str, **choices: Any) -> Any:
    """Program `name` of `kernels.<module>`, compiled for the card.

    Raises:
        BuildError: tilelang or nvcc failed or took too long; the framework then leaves such calls to core.
    """
    import tilelang

    with _building, _patience():
        try:
            made = getattr(importlib.import_module(f"fla_backend_tilelang.kernels.{module}"), name)(**choices)
            return tilelang.compile(
                made, target=TARGET, pass_configs={tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True}
            )
        except Exception as error:
            text = str(error).rpartition("Compilation error:")[2].partition("\nSource:")[0].strip()
            text = text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} ... {text[-SHOWN // 2 :]}"
            # Without the cause, whose text is the source.
            raise BuildError(f"program {name} was not built ({type(error).__name__}: {text})") from None


@functools.lru_cache(maxsize=64)
def blank(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """A tensor for a parameter that the program does not read."""
    return torch.zeros(shape, dtype=dtype, device=device)


def choose_block(V: int, programs: int, device: torch.device) -> int:
    """Rows of the transposed state a program: 64 where that still fills no more than the card at once, else 128.

    A program keeps three chunks in flight, and so a multiprocessor to itself: 64 rows shorten the chain of a chunk, 128
    read q and k once.
    """
    cores = torch.cuda.get_device_properties(device).multi_processor_count
    return 64 if V <= 64 or programs * (V // 64) <= cores else 128
