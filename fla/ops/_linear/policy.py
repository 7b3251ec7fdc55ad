# SPDX-License-Identifier: MIT
"""Launch policy of the scalar-decay kernels: pure rules on the chip, the dtype, K, V and the number of programs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fla.ops._common.policy import Chip, Launch, groups_for, planned, pow2, stretches

# Up to here one launch token by token beats the chunked passes, whose tiles would be mostly padding (predicted).
DECODE_TOKENS = 16


@dataclass(frozen=True)
class ScalarPlan:
    """How the scalar-decay kernels run one class of calls.

    Attributes:
        chunk: tokens a chunk.
        descriptors: whether full tiles go through tensor descriptors.
        dot: ``input_precision`` of the products (matters for fp32 operands only).
        one_scan: whether the forward pass is one scan, for which K must fit in one block; else states, then outputs.
        block_k: columns of K of a tile.
        block_v: columns of V of a program of the forward scan.
        states_v: the same of the passes over states.
        dv_scan: whether dv comes from a scan of its own, for which K must fit in one block; else chunk by chunk.
        thrice: whether gradients, where decays have none, are three scans, for which K and V must fit in one block.
        both: whether dv's scan and the pass over states share a launch, with both_v columns of V and both_stages
            stages for the states.
        groups: groups of four warps, 64 columns of V each, of the forward scan in Gluon, whose ring has ``places``; 0:
            that scan is Triton's.
        grad_k, grad_v: blocks of the chunk gradient.
        out_v: columns of V of a program of what is local to a chunk in outputs and in dv.
    """

    chunk: int
    descriptors: bool
    dot: str
    one_scan: bool
    block_k: int
    block_v: int
    states_v: int
    grad_k: int
    grad_v: int
    out_v: int
    dv_scan: bool
    forward: Launch
    reverse: Launch
    states: Launch
    out: Launch
    grad: Launch
    thrice: bool = False
    both: bool = False
    both_v: int = 64
    both_stages: int = 3
    groups: int = 0
    places: int = 2


def scalar_plan(chip: Chip, dtype: torch.dtype, K: int, V: int, heads: int) -> ScalarPlan:
    """The plan for ``heads`` = sequences times heads. Only whether the heads fill the chip twice matters."""
    return _scalar_plan(chip, dtype, K, V, 2 * heads <= chip.sms)


@planned
def _scalar_plan(chip: Chip, dtype: torch.dtype, K: int, V: int, few: bool) -> ScalarPlan:
    wide = dtype == torch.float32
    if wide or (chip.vendor != "interpreter" and chip.arch // 10 not in (9, 10)):
        # fp32 operands, and those of chips without warp-group products, pass through registers: half the tile.
        bk, bv = min(pow2(K), 64), min(pow2(V), 64)
        one_scan = pow2(K) <= 64
        scan = Launch(4, 1 if wide else 2)
        bv, grad_k = (min(bv, 32), min(bk, 32)) if wide else (bv, bk)
        return ScalarPlan(
            32, False, chip.exact if wide else chip.wide, one_scan, bk, bv, bv, grad_k, bv, bv, False, scan, scan, scan,
            Launch(4, 1), Launch(4),
        )  # fmt: skip
    # With tiles 16 wide ptxas 12.8 builds wrong operand addresses (benchmarks/ops/sass_descriptors.py finds them).
    bk, bv = min(pow2(K, 32), 128), min(pow2(V, 32), 128)
    # Two V blocks a head only where all programs still run at once: one program fills a multiprocessor.
    block_v = 64 if few else bv
    block_v = min(block_v, bv)
    stages = _stages(chip, 64, bk, block_v, 3)
    # Descriptor loads that nothing pipelines have gone wrong before (findings/gdn-forward, lesson 8).
    descriptors = chip.descriptors and K % bk == 0 and V % bv == 0 and stages > 1
    # More than one block of either dim is a loop, beside which a whole block does not fit in the registers.
    grad_k = bk if max(K, V) <= 128 else min(bk, 64)
    launch = Launch(8 if block_v > 64 else 4, stages)
    one_scan = pow2(K) <= 128
    # A scan for dv spills some registers and was still fast on sm90; the stores in its loop do not compile on sm100.
    dv_scan = one_scan and chip.arch // 10 == 9
    return ScalarPlan(
        64, descriptors, chip.wide, one_scan, bk, block_v, min(bv, 64), grad_k, bv, bv, dv_scan, launch, launch,
        Launch(4, 3), Launch(4, 1), Launch(4), thrice=dv_scan and pow2(V) <= 128, both=dv_scan, both_v=min(bv, 64),
        groups=groups_for(chip, dtype, K, V, few), places=3,
    )  # fmt: skip


def _stages(chip: Chip, chunk: int, block_k: int, block_v: int, most: int) -> int:
    """How many steps of a scan (q, k and v tiles) fit in shared memory beside the score tile and the stored tile."""
    step = 2 * chunk * (2 * block_k + block_v)
    rest = 2 * chunk * chunk + 2 * max(chunk, min(block_k, 128)) * block_v
    return max(1, min(most, (chip.smem - rest) // step))


def time_segments(plan: ScalarPlan, chip: Chip, heads: int, V: int, chunks: int) -> int:
    """Stretches of time that run side by side: 1 unless few heads leave most of the chip idle over a long sequence."""
    programs = heads * -(-V // plan.block_v)
    if plan.chunk < 64:
        return 1
    return stretches(programs, chip, chunks)


def time_marks(plan: ScalarPlan, chip: Chip, heads: int, chunks: int) -> int:
    """Stretches of dq's scan, whose states the forward pass leaves behind.

    With three scans of as many programs in one launch, shorter ones at the end fill what the last round leaves idle.
    """
    return 4 if 3 * heads > chip.sms and chunks >= 32 else 1
