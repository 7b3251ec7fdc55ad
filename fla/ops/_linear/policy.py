# SPDX-License-Identifier: MIT
"""Launch policy of the scalar-decay kernels: pure rules on the chip, the dtype, K, V and the number of programs.

The rules are those measured for the delta engine, whose scans have the same shape; none is measured here yet.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from fla.ops._common.policy import Chip, Launch, pow2, stretches

# Up to here one launch token by token beats the chunked passes, whose tiles would be mostly padding (predicted).
DECODE_TOKENS = 16


@dataclass(frozen=True)
class ScalarPlan:
    """How the scalar-decay kernels run one class of calls.

    Attributes:
        chunk: tokens a chunk.
        descriptors: whether full tiles go through tensor descriptors.
        dot: ``input_precision`` of the products (matters for fp32 operands only).
        block_k: K padded to a power of two.
        block_v: V columns of a program of the forward, recomputing and reverse scans.
        grad_k, grad_v: blocks of the chunk gradient.
    """

    chunk: int
    descriptors: bool
    dot: str
    block_k: int
    block_v: int
    grad_k: int
    grad_v: int
    forward: Launch
    recompute: Launch
    reverse: Launch
    grad: Launch


def scalar_plan(chip: Chip, dtype: torch.dtype, K: int, V: int, heads: int) -> ScalarPlan:
    """The plan for ``heads`` = sequences times heads. Only whether the heads fill the chip twice matters."""
    return _scalar_plan(chip, dtype, K, V, 2 * heads <= chip.sms)


@functools.lru_cache(maxsize=256)
def _scalar_plan(chip: Chip, dtype: torch.dtype, K: int, V: int, few: bool) -> ScalarPlan:
    bk, bv = pow2(K), pow2(V)
    wide = dtype == torch.float32
    if wide or (chip.vendor != "interpreter" and chip.arch // 10 not in (9, 10)):
        # fp32 operands, and those of chips without warp-group products, pass through registers: half the tile.
        # fp32 with K above 128 spills even so, and `covers` leaves it to PyTorch.
        block_v = min(bv, (32 if bk <= 128 else 16) if wide else 64)
        scan = Launch(8 if bk > (128 if wide else 64) else 4, 1 if wide else _stages(chip, 32, bk, block_v, 2))
        return ScalarPlan(
            32, False, chip.exact if wide else chip.wide, bk, block_v, min(bk, 32 if wide else 64),
            min(bv, 32 if wide else 64), scan, scan, scan, Launch(4),
        )  # fmt: skip
    # Two V blocks a head only where all programs still run at once: one program fills a multiprocessor. K above 128
    # leaves room for a narrow block only.
    block_v = 128 if bv > 64 and bk <= 128 and not few else min(bv, 64)
    stages = _stages(chip, 64, bk, block_v, 3)
    # Descriptor loads that nothing pipelines have gone wrong before (findings/gdn-forward, lesson 8).
    descriptors = chip.descriptors and bk == K and bv == V and stages > 1
    scan = Launch(8 if block_v > 64 or bk > 128 else 4, stages)
    return ScalarPlan(
        64, descriptors, chip.wide, bk, block_v, min(bk, 128), min(bv, 128), scan, scan, scan, Launch(4)
    )  # fmt: skip


def _stages(chip: Chip, chunk: int, block_k: int, block_v: int, most: int) -> int:
    """How many steps of a scan (q, k and v tiles) fit in shared memory beside the score tile and the stored tile."""
    step = 2 * chunk * (2 * block_k + block_v)
    rest = 2 * chunk * chunk + 2 * max(chunk, min(block_k, 128)) * block_v
    return max(1, min(most, (chip.smem - rest) // step))


def time_segments(plan: ScalarPlan, chip: Chip, heads: int, V: int, chunks: int) -> int:
    """Stretches of time that run side by side: 1 unless few heads leave most of the chip idle over a long sequence."""
    programs = heads * -(-V // plan.block_v)
    if plan.block_k > 128 or plan.chunk < 64:
        return 1
    return stretches(programs, chip, chunks)
