# SPDX-License-Identifier: MIT
"""Launch policy of the norm kernels: pure rules on the chip, the width of a row, and whether there are few rows."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from fla.ops._common.policy import Chip, Launch, pow2

# Rows as wide as this stay in registers; PyTorch takes wider ones.
MAX_WIDTH = 16384


@dataclass(frozen=True)
class NormPlan:
    """How the norm kernels run one class of calls.

    Attributes:
        width: the row padded to a power of two.
        rows: rows of a tile, forward.
        back_rows: rows of a tile, backward.
        programs: programs of a backward that sums over rows.
    """

    width: int
    rows: int
    back_rows: int
    programs: int
    forward: Launch
    backward: Launch


def norm_plan(chip: Chip, width: int, rows: int) -> NormPlan:
    """The plan for ``rows`` rows of ``width`` channels. Only whether full tiles would leave the chip idle matters."""
    padded = pow2(width, 1)
    return _norm_plan(chip, padded, rows * padded < 4096 * 2 * chip.sms)


@functools.lru_cache(maxsize=256)
def _norm_plan(chip: Chip, width: int, few: bool) -> NormPlan:
    tile = 1024 if few else 4096
    rows = max(1, tile // width)
    size = rows * width
    # 32 numbers a thread forward, 16 backward, where twice as many are alive.
    forward = Launch(min(16, max(1, size // 1024)))
    backward = Launch(min(32, max(1, size // 512)), 2)
    return NormPlan(width, rows, rows, 4 * chip.sms if size <= 4096 else 2 * chip.sms, forward, backward)
