# SPDX-License-Identifier: MIT
"""Tile sizes for the unified buffer (UB) of an Ascend core: plain arithmetic, no NPU needed."""

from __future__ import annotations

import functools
import os
import warnings

#: Programs that one launch may have along all axes together.
MAX_GRID = 65535

#: 192 KiB: the smallest buffer of the parts in use (A2).
FALLBACK_BITS = 192 * 1024 * 8


@functools.cache
def ub_capacity_bits() -> int:
    """Bits of unified buffer on one core.

    From `ASCEND_UB_CAPACITY_BITS`, else from the vendor's SoC table, else 192 KiB with a warning.

    Raises:
        ValueError: the variable is no positive whole number.
    """
    text = os.environ.get("ASCEND_UB_CAPACITY_BITS")
    if text is not None:
        if not text.strip().isdecimal() or int(text) == 0:
            raise ValueError(f"ASCEND_UB_CAPACITY_BITS must be a positive whole number of bits, got {text!r}")
        return int(text)
    try:
        from tbe.common.platform import get_soc_spec

        found = int(get_soc_spec("UB_SIZE")) * 8
        if found > 0:
            return found
    except Exception:  # not installed, or no SoC set: either way it does not know
        pass
    warnings.warn(
        f"the size of the unified buffer is not known, assuming {FALLBACK_BITS // 8192} KiB; "
        "set ASCEND_UB_CAPACITY_BITS to say it",
        stacklevel=2,
    )
    return FALLBACK_BITS


def tile_rows(bits_per_row: int, rows: int, *, fixed_bits: int = 0, capacity_bits: int | None = None) -> int:
    """Largest power of two of rows, at most `rows` rounded up to one, whose tile fits the buffer.

    Args:
        bits_per_row: what one row takes, all tensors and temporaries of the kernel counted.
        fixed_bits: what the kernel takes whatever the tile.
        capacity_bits: the buffer; `ub_capacity_bits()` if not given.

    Raises:
        ValueError: not even one row fits, or an argument is out of range.
    """
    if bits_per_row <= 0 or rows <= 0 or fixed_bits < 0:
        raise ValueError(
            f"bits_per_row and rows must be positive, fixed_bits not negative; got {bits_per_row}, {rows}, {fixed_bits}"
        )
    capacity = ub_capacity_bits() if capacity_bits is None else capacity_bits
    fit = (capacity - fixed_bits) // bits_per_row
    if fit < 1:
        raise ValueError(f"one row of {bits_per_row} bits beside {fixed_bits} does not fit {capacity} bits")
    return min(1 << (fit.bit_length() - 1), 1 << (rows - 1).bit_length())


def programs_per_launch(programs: int) -> int:
    """Programs to launch for `programs` units of work; each takes every n-th unit where they exceed the grid."""
    return min(programs, MAX_GRID)
