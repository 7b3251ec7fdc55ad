# SPDX-License-Identifier: MIT
"""Launch policy of the elementwise scan: pure rules on the chip, the channels and the length."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from fla.ops._common.policy import Chip, Launch, pow2

# Up to here a single small tile holds all of time.
DECODE_TOKENS = 8


@dataclass(frozen=True)
class ScanPlan:
    """How the scan runs one class of calls.

    Attributes:
        tokens: tokens that a thread scans one after another.
        runs: such runs side by side in a tile.
        channels: channels of a tile, two a thread.
    """

    tokens: int
    runs: int
    channels: int
    forward: Launch
    backward: Launch


@functools.lru_cache(maxsize=64)
def scan_plan(chip: Chip, D: int, short: bool) -> ScanPlan:
    """The plan for ``D`` channels; ``short``: at most `DECODE_TOKENS` tokens a row."""
    if short:
        return ScanPlan(DECODE_TOKENS, 1, min(256, pow2(D)), Launch(4), Launch(4))
    # One warp: what a tile costs in waiting for other warps grows with their number. On H200, B1 T8192 D12288, four
    # warps with as much work each took 0.60 ms forward and 0.91 backward, two 0.38 and 0.55.
    return ScanPlan(16, 2, min(32, pow2(D)), Launch(1, 3), Launch(1, 3))


def stretches(plan: ScanPlan, chip: Chip, rows: int, D: int, T: int) -> tuple[int, int]:
    """Number of stretches of time, and the tokens of one.

    The summaries cost two thirds of the forward once more, so time is cut only where half the chip would be idle.
    """
    programs = rows * -(-D // plan.channels)
    tile = plan.tokens * plan.runs
    tiles = max(1, -(-T // tile))
    wanted = 1 if programs >= chip.sms else -(-8 * chip.sms // max(programs, 1))
    wanted = max(1, min(wanted, tiles // 4, 32))
    each = -(-tiles // wanted)
    return -(-tiles // each), each * tile
