# SPDX-License-Identifier: MIT
"""What the machine has. torch is used only where something has imported it; triton is imported when an op needs it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from fla import settings


def loaded_torch() -> Any:
    """The torch module if something has imported it, else None."""
    return sys.modules.get("torch")


def is_grad_enabled() -> bool:
    torch = loaded_torch()
    return torch is not None and bool(torch.is_grad_enabled())


def has_module(name: str) -> bool:
    """Whether a module can be found. The module itself is not imported (parents of a dotted name are)."""
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):
        return False


@lru_cache(maxsize=1)
def triton_device_types() -> frozenset[str]:
    """torch device types that Triton can drive here. Empty without triton or without a driver."""
    torch = loaded_torch()
    accelerators = [name for name in ("cuda", "xpu", "npu") if torch is not None and _has_device(torch, name)]
    if not accelerators or not has_module("triton"):
        return frozenset()
    try:
        from triton.runtime import driver

        backend = driver.active.get_current_target().backend
    except Exception as error:  # whatever a broken driver raises: there is none then
        settings.warn_once(
            "triton", "driver", f"triton has no usable driver ({type(error).__name__}: {error}); ops run in PyTorch"
        )
        return frozenset()
    return frozenset({"cuda" if backend == "hip" else str(backend)})


def _has_device(torch: Any, name: str) -> bool:
    library = getattr(torch, name, None)
    try:
        return library is not None and bool(library.is_available())
    except Exception:  # a vendor library that cannot say has no device
        return False


def triton_interprets() -> bool:
    """Whether TRITON_INTERPRET asks for the interpreter and triton is there."""
    return (settings.read_environment("TRITON_INTERPRET") or "0").lower() in ("1", "true", "yes", "on") and has_module(
        "triton"
    )


def concrete(device: Any) -> Any:
    """The device that a meta tensor stands for: this machine's accelerator, or the CPU."""
    torch = loaded_torch()
    if torch is None or getattr(device, "type", None) != "meta":
        return device
    return torch.device(next((name for name in ("cuda", "xpu", "npu") if _has_device(torch, name)), "cpu"))


def compute_capability_objections(device: Any, least: tuple[int, ...]) -> Iterator[str]:
    """Why ``device`` has not the NVIDIA compute capability ``least``; nothing where it has."""
    torch = loaded_torch()
    wanted = ".".join(map(str, least))
    if device.type != "cuda":
        yield f"device is {device.type}, needed: CUDA with compute capability {wanted}"
    elif torch is not None and getattr(torch.version, "hip", None):
        yield f"device is ROCm, needed: CUDA with compute capability {wanted}"
    elif torch is not None and not _has_device(torch, "cuda"):
        # Asked about a machine other than this one (explain with fake tensors).
        yield f"no CUDA device is here to read the compute capability of, needed: {wanted}"
    elif torch is not None:
        found = tuple(torch.cuda.get_device_capability(device))
        if found < least:
            yield f"compute capability is {'.'.join(map(str, found))}, needed: {wanted}"


@lru_cache(maxsize=1)
def has_usable_nvcc() -> bool:
    """Whether an nvcc can be run: CUDA_HOME, CUDA_PATH, PATH, the nvidia-cuda-nvcc wheel, or /usr/local/cuda.

    The cu12 wheel of that name ships ptxas alone, so its file list is looked at.
    """
    from importlib import metadata

    name = "nvcc.exe" if os.name == "nt" else "nvcc"
    roots = [os.environ[variable] for variable in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(variable)]
    if any((Path(root) / "bin" / name).is_file() for root in roots) or shutil.which("nvcc"):
        return True
    for distribution in ("nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc-cu13"):
        try:
            files = metadata.files(distribution) or []
        except metadata.PackageNotFoundError:
            continue
        if any(Path(str(file)).name == name for file in files):
            return True
    return (Path("/usr/local/cuda/bin") / name).is_file()


def forget() -> None:
    """Look again at the next question (after an installation)."""
    triton_device_types.cache_clear()
    has_usable_nvcc.cache_clear()


def several_ranks() -> bool:
    """Whether this process is one of several in a torch.distributed group."""
    distributed = sys.modules.get("torch.distributed")
    try:
        return bool(
            distributed is not None
            and distributed.is_available()
            and distributed.is_initialized()
            and distributed.get_world_size() > 1
        )
    except Exception:  # a group that cannot say its size: do as if others hang on us
        return True


def in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread."""
    torch = loaded_torch()
    task = getattr(getattr(torch, "_C", None), "_current_graph_task_id", None)
    return task is not None and task() != -1
