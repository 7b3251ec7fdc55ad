# SPDX-License-Identifier: MIT
"""What is known about Ascend chips, and which one is here."""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any

KIB = 1024
#: Bytes of the unified buffer of a vector core, by the start of the SoC's name: 1,572,864 bits on the 910B and 910_93
#: series (what the compiler of triton-ascend names when a program overflows it), 256 KiB on the 310P.
UNIFIED_BUFFER = {"Ascend910B": 192 * KIB, "Ascend910_93": 192 * KIB, "Ascend310P": 256 * KIB}
#: The least of them, where nothing is known.
FALLBACK = 192 * KIB
#: AI cores of the smallest 910B, where the driver does not say.
CORES = 20
#: Programs of one launch.
GRID_LIMIT = 65535


def capacity(soc: str | None, bits: str | None = None) -> int:
    """Bytes of unified buffer: `bits` (``ASCEND_UB_CAPACITY_BITS``) if given, else by the SoC's name, else the least.

    Raises:
        ValueError: `bits` is no positive number of whole bytes.
    """
    if bits:
        if not bits.isdecimal() or int(bits) == 0 or int(bits) % 8:
            raise ValueError(f"ASCEND_UB_CAPACITY_BITS must be a positive multiple of 8, got {bits!r}")
        return int(bits) // 8
    for name, size in UNIFIED_BUFFER.items():
        if soc is not None and soc.startswith(name):
            return size
    warnings.warn(
        f"fla-backend-ascend does not know the unified buffer of {soc or 'this NPU'} and takes {FALLBACK // KIB} KiB; "
        "ASCEND_UB_CAPACITY_BITS says otherwise",
        RuntimeWarning,
        stacklevel=2,
    )
    return FALLBACK


def facts(npu: Any, index: int) -> tuple[int, int]:
    """Bytes of unified buffer and number of AI cores of NPU `index`, from ``torch.npu``."""
    soc = npu.get_device_name(index)
    properties = npu.get_device_properties(index)
    cores = next(
        (n for name in ("cube_core_num", "multi_processor_count") if (n := getattr(properties, name, 0))), CORES
    )
    return capacity(soc, os.environ.get("ASCEND_UB_CAPACITY_BITS")), int(cores)


def chip_of(device: Any) -> Any:
    """Core's description of a device."""
    import torch

    return chip(getattr(torch, "npu").current_device() if device.index is None else device.index)  # noqa: B009


@functools.lru_cache(maxsize=64)
def chip(index: int) -> Any:
    """Core's description of NPU `index`."""
    import torch

    from fla_backend_ascend.policy import described

    return described(*facts(getattr(torch, "npu"), index))  # noqa: B009  # torch_npu puts it there
