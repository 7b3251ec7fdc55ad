# SPDX-License-Identifier: MIT
"""What the machine has, asked of torch at first use.

The argument-free facts speak of device 0; on a host of unlike devices ask the functions that take an index.
Nothing here needs triton, and a host without an accelerator is a `cpu` host: our ops compute there.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib.machinery
import importlib.util
import logging
import platform
import warnings
from typing import Any

import torch

logger = logging.getLogger(__name__)

_TORCH_TYPE = {"cuda": "cuda", "hip": "cuda", "xpu": "xpu"}


class Backend(enum.Enum):
    """Shared memory per block, in bytes, that a generation of devices offers at least."""

    ADA = 101376
    AMPERE = 166912
    HOPPER = 232448
    DEFAULT = 102400

    @classmethod
    def get_shared_memory(cls, arch: str) -> int:
        """Bytes for a name in any case; the default for an unknown name."""
        return cls.__members__.get(arch.upper(), cls.DEFAULT).value


def _usable(library: Any) -> bool:
    try:
        return library is not None and bool(library.is_available())
    except Exception:  # a vendor library that cannot say has no device
        return False


@functools.cache
def get_available_device() -> str:
    """`cuda`, `hip`, `xpu` or `npu`, as Triton names its backends; `cpu` where there is no accelerator."""
    if torch.cuda.is_available():
        return "hip" if torch.version.hip else "cuda"
    return next((name for name in ("xpu", "npu") if _usable(getattr(torch, name, None))), "cpu")


def map_triton_backend_to_torch_device() -> str:
    """The torch device type of `get_available_device`."""
    found = get_available_device()
    return _TORCH_TYPE.get(found, found)


def device() -> str:
    """torch device type on which tensors of this host compute."""
    return map_triton_backend_to_torch_device()


def device_torch_lib() -> Any:
    """The module `torch.<device>`."""
    return getattr(torch, device())


def is_nvidia() -> bool:
    return get_available_device() == "cuda"


def is_amd() -> bool:
    return get_available_device() == "hip"


def is_intel() -> bool:
    return get_available_device() == "xpu"


def is_npu() -> bool:
    return get_available_device() == "npu"


def is_arm() -> bool:
    return platform.machine().lower() in ("aarch64", "arm64")


def is_intel_alchemist() -> bool:
    return is_intel() and "Arc(TM) A" in torch.xpu.get_device_name(0)


def _nvidia_capability() -> tuple[int, int]:
    return get_device_capability(0) if is_nvidia() else (0, 0)


def is_nvidia_hopper() -> bool:
    return _nvidia_capability()[0] == 9


def is_nvidia_sm100() -> bool:
    return _nvidia_capability()[0] == 10


def is_nvidia_sm120() -> bool:
    return _nvidia_capability() == (12, 0)


def is_nvidia_blackwell() -> bool:
    return _nvidia_capability()[0] in (10, 12)


def is_tf32_supported() -> bool:
    return _nvidia_capability()[0] >= 8


def is_amd_tma_arch() -> bool:
    return is_amd() and get_device_arch() == "gfx1250"


@functools.cache
def get_device_arch() -> str:
    """Architecture of device 0 without feature flags: `90`, `gfx942`; empty where there is none."""
    try:
        if is_nvidia():
            return "".join(map(str, get_device_capability(0)))
        if is_amd():
            return torch.cuda.get_device_properties(0).gcnArchName.split(":")[0]
    except Exception:  # a driver that cannot say
        logger.debug("the device does not state its architecture", exc_info=True)
    return ""


@functools.cache
def get_device_capability(device_index: int = 0) -> tuple[int, int]:
    """CUDA compute capability of a device.

    Raises:
        RuntimeError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise RuntimeError(f"compute capability belongs to CUDA devices, this host computes on {device()}")
    major, minor = torch.cuda.get_device_capability(device_index)
    return major, minor


@functools.cache
def get_device_smem_optin(device_index: int = 0) -> int:
    """Most shared memory, in bytes, that one block may ask for."""
    properties = torch.cuda.get_device_properties(device_index)
    return int(getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block)


@functools.cache
def get_multiprocessor_count(tensor_idx: int = 0, *, use_aicore: bool = False) -> int:
    """Multiprocessors of a device; on an NPU its vector cores, or its AI cores. 1 where that is not known."""
    if get_available_device() == "cpu":
        return 1
    names = ("cube_core_num" if use_aicore else "vector_core_num",) if is_npu() else ()
    names = (*names, "multi_processor_count", "gpu_subslice_count")
    try:
        properties = device_torch_lib().get_device_properties(tensor_idx)
    except Exception:  # a driver that cannot say
        return 1
    return next((int(getattr(properties, n)) for n in names if getattr(properties, n, None)), 1)


def get_all_max_shared_mem() -> list[int]:
    """`get_device_smem_optin` of every device; `[-1]` with a warning where that is not known."""
    try:
        if get_available_device() not in ("cuda", "hip"):
            raise RuntimeError(f"a {device()} host has no such figure")
        return [get_device_smem_optin(i) for i in range(torch.cuda.device_count())]
    except Exception as error:
        warnings.warn(f"shared memory of the devices is not known: {error}", stacklevel=2)
        return [-1]


@functools.cache
def check_shared_mem(arch: str = "none", tensor_idx: int = 0) -> bool:
    """Whether a device offers the shared memory of `arch` (`ada`, `ampere`, `hopper`, else the default)."""
    try:
        return get_device_smem_optin(tensor_idx) >= Backend.get_shared_memory(arch)
    except Exception:  # no such device, or a driver that cannot say
        return False


def custom_device_ctx(index: int | None) -> contextlib.AbstractContextManager[Any]:
    """Makes device `index` the current one; does nothing for None and on a host without an accelerator."""
    library = device_torch_lib()
    if index is None or device() == "cpu" or not hasattr(library, "device"):
        return contextlib.nullcontext()
    return library.device(index)


def ascend_compile_kwargs(*, blacklist_auto_blockify: bool = False, workspace_multibuffer: int = 1) -> dict[str, Any]:
    """Launch options for kernels on an Ascend NPU; empty elsewhere.

    Raises:
        NotImplementedError: on an NPU. Core has no kernels for it, and with them no launch options.
    """
    if not is_npu():
        return {}
    raise NotImplementedError("core has no Ascend kernels and no launch options for them")


@functools.cache
def find_spec_cached(name: str) -> importlib.machinery.ModuleSpec | None:
    """`importlib.util.find_spec`, remembered. None also where a parent package is missing."""
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise  # the parent exists and lacks a module of its own: that is a broken installation


@functools.cache
def has_usable_nvcc() -> bool:
    """Whether an nvcc can be run here. Says once in the log when none can, as TileLang then stays unused."""
    from fla.backends.devices import has_usable_nvcc as found

    if not found():
        logger.warning(
            "no usable nvcc found (CUDA_HOME, CUDA_PATH, PATH, wheel, /usr/local/cuda): TileLang is not used"
        )
        return False
    return True
