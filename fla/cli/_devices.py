# SPDX-License-Identifier: MIT
"""The torch build, the devices it sees and whether Triton can drive them. Every function here imports torch."""

from __future__ import annotations

from typing import Any

from fla.cli._output import CliError

# What `--require` may name -> torch device type. ROCm builds of torch call their device "cuda".
PLATFORMS = {"cuda": "cuda", "rocm": "cuda", "xpu": "xpu", "npu": "npu", "cpu": "cpu"}


def torch_facts() -> dict[str, Any]:
    """Version and build of torch."""
    import torch

    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "xpu": getattr(torch.version, "xpu", None),
        "threads": torch.get_num_threads(),
    }


def devices() -> list[dict[str, Any]]:
    """Every accelerator torch can use, then the CPU: `platform`, `type`, `index`, `name` and what the driver tells."""
    import torch

    found: list[dict[str, Any]] = []
    if torch.cuda.is_available():
        platform = "rocm" if torch.version.hip else "cuda"
        for index in range(torch.cuda.device_count()):
            found.append({"platform": platform, "type": "cuda", "index": index, **_cuda(index)})
    for name in ("xpu", "npu"):
        library = getattr(torch, name, None)
        if library is not None and library.is_available():
            for index in range(library.device_count()):
                label = library.get_device_name(index)
                found.append({"platform": name, "type": name, "index": index, "name": label})
    found.append({"platform": "cpu", "type": "cpu", "index": None, "name": _cpu_name()})
    return found


def _cuda(index: int) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "shared_memory_kib": getattr(properties, "shared_memory_per_block_optin", 0) // 1024 or None,
        "memory_gib": round(properties.total_memory / 2**30, 1),
    }


def _cpu_name() -> str:
    import os
    import platform

    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def usable_device(name: str) -> Any:
    """The torch device `name` means (`auto`: the first accelerator, else the CPU), after one tensor was put on it.

    Raises:
        CliError: there is no such device (exit code 3).
    """
    import torch

    if name == "auto":
        first = devices()[0]
        name = first["type"] if first["index"] is None else f"{first['type']}:{first['index']}"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise CliError(f"--device {name} cannot be used: {reason}", 3) from None
    if device.type == "meta":
        raise CliError("--device meta holds no data, nothing can run on it", 3)
    return device


def triton_facts() -> dict[str, Any]:
    """Whether triton imports and which backend its driver has (`None`: no driver, so no kernel can run)."""
    try:
        import triton
    except Exception as error:  # a broken triton must be reported, not crash the report
        return {"version": None, "driver": None, "error": _line(error)}
    try:
        target = triton.runtime.driver.active.get_current_target()
    except Exception as error:
        return {"version": triton.__version__, "driver": None, "error": _line(error)}
    return {"version": triton.__version__, "driver": f"{target.backend} {target.arch}", "error": None}


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
