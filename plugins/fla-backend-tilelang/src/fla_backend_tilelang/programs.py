# SPDX-License-Identifier: MIT
"""Compiled programs, one for each set of compile-time choices, kept for the life of the process (and by tilelang on
disk)."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

#: The only architecture that these programs are written for.
TARGET = {"kind": "cuda", "arch": "sm_90a"}
NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


@functools.cache
def program(module: str, name: str, **choices: Any) -> Any:
    """Program `name` of `kernels.<module>`, compiled for the card.

    Raises:
        Exception: whatever tilelang or nvcc raise; the framework quarantines a backend that fails.
    """
    import importlib

    import tilelang

    made = getattr(importlib.import_module(f"fla_backend_tilelang.kernels.{module}"), name)(**choices)
    return tilelang.compile(made, target=TARGET, pass_configs={tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True})


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
