# SPDX-License-Identifier: MIT
"""Which exceptions out of a backend may be answered by running something else."""

from __future__ import annotations

from fla.backends import devices

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")
_DEVICE_FAULT = (
    "device-side assert",
    "illegal memory access",
    "illegal address",
    "illegal instruction",
    "misaligned address",
    "unspecified launch failure",
    "launch timed out",
    "hardware stack error",
    "uncorrectable ecc",
    "nvlink error",
    "device lost",
    "memory access fault",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on the host or on a device."""
    torch = devices.loaded_torch()
    known = getattr(torch, "OutOfMemoryError", None)
    if isinstance(error, MemoryError) or (known is not None and isinstance(error, known)):
        return True
    # Libraries other than torch raise plain RuntimeErrors.
    return any(mark in str(error).lower() for mark in _OUT_OF_MEMORY)


def is_device_fault(error: BaseException) -> bool:
    """Whether the device is in a state after which nothing on it can be trusted."""
    return any(mark in str(error).lower() for mark in _DEVICE_FAULT)


def must_propagate(error: BaseException) -> bool:
    """Whether ``error`` has to reach the caller, whatever else could run."""
    return (
        not isinstance(error, Exception)
        or is_out_of_memory(error)
        or is_device_fault(error)
        or devices.several_ranks()
        or devices.in_backward()
    )


def note(error: BaseException, text: str) -> None:
    """Say in the traceback where an exception came from (Python 3.11 and later)."""
    if hasattr(error, "add_note"):
        error.add_note(f"[FLA Backend] {text}")
