# SPDX-License-Identifier: MIT
"""Whether programs can be built here. Nothing is imported or run."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


def _candidates() -> Iterator[Path]:
    found = shutil.which("nvcc")
    if found:
        yield Path(found)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            yield Path(os.environ[name], "bin", "nvcc")
    yield Path("/usr/local/cuda/bin/nvcc")
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(Path(root).glob("cu*/bin/nvcc"))
        yield Path(root, "cuda_nvcc", "bin", "nvcc")


def nvcc() -> Path | None:
    """CUDA's compiler, where tilelang looks for it, or None."""
    return next((path for path in _candidates() if path.is_file()), None)


def missing() -> str | None:
    """What keeps programs from being built here, in a sentence, or None."""
    if importlib.util.find_spec("tilelang") is None:
        return "module tilelang is not installed; pip install 'tilelang>=0.1.15'"
    if nvcc() is None:
        return (
            "no nvcc in PATH, CUDA_HOME, /usr/local/cuda or the nvidia packages; install the CUDA toolkit, or "
            "pip install 'tilelang[nvcc]'"
        )
    return None
