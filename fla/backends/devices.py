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


def is_transforming() -> bool:
    """Whether a ``torch.func`` transform or forward-mode differentiation is on."""
    torch = loaded_torch()
    if torch is None:
        return False
    return torch.autograd.forward_ad._current_level >= 0 or bool(torch._C._are_functorch_transforms_active())


def has_module(name: str) -> bool:
    """Whether a module can be found. The module itself is not imported (parents of a dotted name are)."""
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):
        return False


ACCELERATORS = ("cuda", "xpu", "npu")
SYSTEM_CUDA = Path("/usr/local/cuda")
_accelerators: tuple[str, ...] | None = None
_drivers: dict[str, bool] = {}


def accelerators() -> tuple[str, ...]:
    """torch device types of which this machine has a device. Initialises none of them."""
    global _accelerators
    torch = loaded_torch()
    if _accelerators is None and torch is not None:
        _accelerators = tuple(name for name in ACCELERATORS if _has_device(torch, name))
    return _accelerators or ()


def triton_possible() -> bool:
    """Whether any tensor could be driven by Triton here; without asking a driver, which initialises the device."""
    return bool(accelerators()) and has_module("triton")


def triton_devices() -> list[str]:
    """torch device types that Triton may drive here; a driver that nobody has asked so far counts."""
    return [name for name in accelerators() if has_module("triton") and _drivers.get(name, True)]


def has_triton_driver(device_type: str | None) -> bool:
    """Whether Triton drives tensors of a device type. The first question about an accelerator asks its driver."""
    if device_type not in accelerators() or not has_module("triton"):
        return False
    if device_type not in _drivers:
        try:
            from triton.runtime import driver

            backend = driver.active.get_current_target().backend
        except Exception as error:  # whatever a broken driver raises: there is none then
            settings.warn_once(
                "triton", "driver", f"triton has no usable driver ({type(error).__name__}: {error}); ops run in PyTorch"
            )
            _drivers[device_type] = False
        else:
            _drivers[device_type] = device_type == ("cuda" if backend == "hip" else backend)
    return _drivers[device_type]


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
    return torch.device(next(iter(accelerators()), "cpu"))


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
        try:
            found = tuple(torch.cuda.get_device_capability(device))
        except Exception:  # a fake tensor on a device that this machine lacks
            yield f"the compute capability of {device} cannot be read here, needed: {wanted}"
            return
        if found < least:
            yield f"compute capability is {'.'.join(map(str, found))}, needed: {wanted}"


@lru_cache(maxsize=1)
def find_nvcc() -> tuple[str, str] | None:
    """Path of an nvcc and what led to it (CUDA_HOME, CUDA_PATH, PATH, a wheel, the system's folder), or None.

    The nvidia-cuda-nvcc-cu12 wheel ships ptxas alone, so the files of a wheel are looked at.
    """
    from importlib import metadata

    name = "nvcc.exe" if os.name == "nt" else "nvcc"
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        path = Path(os.environ.get(variable) or os.devnull) / "bin" / name
        if path.is_file():
            return str(path), variable
    if found := shutil.which("nvcc"):
        return found, "PATH"
    for distribution in ("nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc-cu13"):
        try:
            files = metadata.files(distribution) or []
        except metadata.PackageNotFoundError:
            continue
        for file in files:
            if Path(str(file)).name == name:
                return str(file.locate() if hasattr(file, "locate") else file), distribution
    path = SYSTEM_CUDA / "bin" / name
    return (str(path), str(SYSTEM_CUDA)) if path.is_file() else None


def has_usable_nvcc() -> bool:
    return find_nvcc() is not None


def forget() -> None:
    """Look again at the next question (after an installation)."""
    global _accelerators
    _accelerators = None
    _drivers.clear()
    find_nvcc.cache_clear()


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
