# SPDX-License-Identifier: MIT
"""Public helpers: what the machine has, decorators for op entry points, comparison of results.

Importing this package imports neither torch nor triton. Names are looked up when they are first used; the facts about
the device (`device`, `IS_NVIDIA_HOPPER`, ...) ask torch at that moment, and triton only where a name is about triton.
"""

from __future__ import annotations

import importlib
from typing import Any

_FUNCTIONS = {
    "facts": (
        "Backend",
        "ascend_compile_kwargs",
        "check_shared_mem",
        "custom_device_ctx",
        "find_spec_cached",
        "get_all_max_shared_mem",
        "get_available_device",
        "get_device_arch",
        "get_device_capability",
        "get_device_smem_optin",
        "get_multiprocessor_count",
        "has_usable_nvcc",
        "map_triton_backend_to_torch_device",
    ),
    "versions": (
        "check_environments",
        "check_pytorch_version",
        "check_transformers_version",
        "require_version",
        "supports_transformers_next_sequence_length",
    ),
    "caching": ("tensor_cache",),
    "decorators": ("autocast_custom_bwd", "autocast_custom_fwd", "checkpoint", "contiguous", "input_guard"),
    "deprecation": ("Action", "deprecate_kwarg"),
    "compare": ("assert_close", "get_abs_err", "get_err_ratio"),
}
_HOME = {name: module for module, names in _FUNCTIONS.items() for name in names}

#: Facts by name, each with the function in `facts` or `versions` that finds it. ``IS_*`` exist in lower case as well.
_FACTS = {
    "device": "facts:device",
    "device_name": "facts:device",
    "device_platform": "facts:get_available_device",
    "device_torch_lib": "facts:device_torch_lib",
    "IS_NVIDIA": "facts:is_nvidia",
    "IS_AMD": "facts:is_amd",
    "IS_INTEL": "facts:is_intel",
    "IS_NPU": "facts:is_npu",
    "IS_ARM": "facts:is_arm",
    "IS_INTEL_ALCHEMIST": "facts:is_intel_alchemist",
    "IS_NVIDIA_HOPPER": "facts:is_nvidia_hopper",
    "IS_NVIDIA_SM100": "facts:is_nvidia_sm100",
    "IS_NVIDIA_SM120": "facts:is_nvidia_sm120",
    "IS_NVIDIA_BLACKWELL": "facts:is_nvidia_blackwell",
    "IS_TF32_SUPPORTED": "facts:is_tf32_supported",
    "IS_AMD_TMA_ARCH": "facts:is_amd_tma_arch",
    "IS_GATHER_SUPPORTED": "versions:is_gather_supported",
    "IS_TMA_SUPPORTED": "versions:is_tma_supported",
    "SUPPORTS_AUTOTUNE_CACHE": "versions:supports_autotune_cache",
    "TRITON_ABOVE_3_4_0": "versions:triton_above_3_4_0",
    "TRITON_ABOVE_3_5_1": "versions:triton_above_3_5_1",
    "TRITON_ABOVE_3_6_0": "versions:triton_above_3_6_0",
    "TRITON_ABOVE_3_7_1": "versions:triton_above_3_7_1",
    "TRITON_ABOVE_3_8_0": "versions:triton_above_3_8_0",
    "autotune_cache_kwargs": "versions:autotune_cache_kwargs",
    "FLA_DISABLE_TENSOR_CACHE": "caching:disabled",
}
_FACTS |= {name.lower(): where for name, where in _FACTS.items() if name.startswith("IS_")}

__all__ = sorted([*_HOME, *_FACTS])


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"fla.utils.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    if name in _FACTS:
        # Not kept here: the functions remember what is costly, and a setting may change.
        module, function = _FACTS[name].split(":")
        return getattr(importlib.import_module(f"fla.utils.{module}"), function)()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
