# SPDX-License-Identifier: MIT
"""Launch policy of the norm kernels: pure rules on the width of a row and on whether there are few rows."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from fla.ops._common.policy import Chip, Launch, pow2

# Rows as wide as this stay in registers; PyTorch takes wider ones.
MAX_WIDTH = 16384
# Below this many numbers, full tiles would leave most of a large chip idle.
FEW = 1 << 19


@dataclass(frozen=True)
class NormPlan:
    """How the norm kernels run one class of calls.

    Attributes:
        width: the row padded to a power of two.
        rows: rows of a tile, forward.
        back_rows: rows of a tile, backward.
        per_sm: programs for each multiprocessor of a backward that sums over rows.
    """

    width: int
    rows: int
    back_rows: int
    per_sm: int
    forward: Launch
    backward: Launch


@functools.lru_cache(maxsize=256)
def norm_plan(width: int, few: bool) -> NormPlan:
    """The plan for rows of ``width`` channels; ``few``: less than `FEW` numbers in all."""
    padded = pow2(width, 1)
    rows = max(1, (1024 if few else 4096) // padded)
    size = rows * padded
    # 32 numbers a thread forward, 16 backward, where twice as many are alive. Two programs on a multiprocessor with
    # the next two tiles under way were the fastest on H200 (0.061 ms for 8192 x 4096, four with one tile 0.081).
    forward = Launch(min(16, max(1, size // 1024)))
    backward = Launch(min(32, max(1, size // 512)), 3)
    return NormPlan(padded, rows, rows, 2, forward, backward)


def back_stages(plan: NormPlan, chip: Chip, bytes_each: int) -> int:
    """Stages of the backward's loop: the tiles under way, ``bytes_each`` for every number, must fit in shared memory
    beside a row of weights, which changes its layout there, and what the sums need."""
    free = chip.smem - 16384 - 4 * plan.width
    return max(1, min(plan.backward.stages, 1 + free // (plan.back_rows * plan.width * bytes_each)))
