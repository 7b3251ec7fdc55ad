# SPDX-License-Identifier: MIT
"""Launch policy of the scalar-decay kernels: pure rules on the chip, the dtype, K, V and the number of programs."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from fla.ops._common.policy import Chip, Launch, planned, pow2, stretches


@dataclass(frozen=True)
class ScalarPlan:
    """How the scalar-decay kernels run one class of calls.

    Attributes:
        chunk: tokens a chunk.
        descriptors: whether full tiles go through tensor descriptors.
        dot: ``input_precision`` of the products (matters for fp32 operands only).
        inverse: precision of the products in the triangular inverse, see `mdot`.
        step: tokens a step of the scans; a part of a chunk where its tiles are too wide for three at once.
        forward_step: the same of the forward scan; None: as ``step``.
        block_k: K padded to a power of two.
        block_v: V columns of a program of the forward scan, of the summaries and of the reverse scan.
        again_v: the same of the scan that computes states again.
        prep_k, grad_k, grad_v: blocks of the first stage and of the chunk gradient; scores_v: V block of the score
            gradients, a stage of their own where ``grad_k`` is not all of K.
        chunk_groups: whether the first stage and the gradients of whole chunks run in Gluon.
        groups: groups of four warps, 64 columns of V each, of the state passes in Gluon; 0: those passes are Triton's.
        groups_again: whether the pass that computes states again is one of those.
    """

    chunk: int
    step: int
    descriptors: bool
    dot: str
    inverse: str
    block_k: int
    block_v: int
    again_v: int
    prep_k: int
    grad_k: int
    grad_v: int
    scores_v: int
    prep: Launch
    forward: Launch
    recompute: Launch
    reverse: Launch
    grad: Launch
    scores: Launch
    chip: Chip
    forward_step: int | None = None
    groups: int = 0
    chunk_groups: bool = False
    groups_again: bool = True

    @functools.cached_property
    def options(self) -> tuple[dict[str, Any], ...]:
        """Compiler options of prep, forward, recompute, reverse, grad and scores, in this order."""
        stages = (self.prep, self.forward, self.recompute, self.reverse, self.grad, self.scores)
        return tuple(x.options(self.chip) for x in stages)


def scalar_plan(
    chip: Chip, dtype: torch.dtype, K: int, V: int, heads: int, norm: bool, read: bool = False
) -> ScalarPlan:
    """The plan for ``heads`` = sequences times value heads. Only whether their narrow V blocks fill the chip matters.
    ``read``: the op has a read key of its own, one more tile of each step."""
    return _scalar_plan(chip, dtype, K, V, heads * max(2, -(-V // 64)) <= chip.sms, norm, read)


@planned
def _scalar_plan(chip: Chip, dtype: torch.dtype, K: int, V: int, few: bool, norm: bool, read: bool) -> ScalarPlan:
    wide = dtype == torch.float32
    # From rows of 32 bytes in shared memory ptxas 12.8 has read the wrong ones (benchmarks/ops/sass_descriptors.py), so
    # 16-bit tiles of less than 32 columns are padded.
    least = 16 if wide or chip.vendor == "interpreter" else 32
    bk, bv = pow2(K, least), pow2(V, least)
    descriptors = chip.descriptors and bk == K and bv == V
    # The inverse of unit-norm keys stays small; of others it may need the range of fp32, which float16 calls see to.
    inverse = chip.exact if wide else ("fp16" if norm or dtype == torch.float16 else chip.wide)
    if wide:
        scan = Launch(8 if bk > 128 else 4)
        return ScalarPlan(
            chunk=32, step=32, descriptors=False, dot=chip.exact, inverse=inverse, block_k=bk, block_v=min(bv, 32),
            again_v=min(bv, 32), prep_k=min(bk, 32), grad_k=min(bk, 32), grad_v=min(bv, 32), scores_v=min(bv, 32),
            prep=Launch(4), forward=scan, recompute=scan, reverse=scan, grad=Launch(4), scores=Launch(4), chip=chip,
        )  # fmt: skip
    if chip.vendor != "interpreter" and chip.arch // 10 not in (9, 10):
        # Without warp-group products all operands pass through registers: half the tile.
        block_v = min(bv, 64)
        scan = Launch(8 if bk > 64 else 4, _stages(chip, 32, bk, block_v, 2, read))
        return ScalarPlan(
            chunk=32, step=32, descriptors=False, dot=chip.wide, inverse=inverse, block_k=bk, block_v=block_v,
            again_v=block_v, prep_k=min(bk, 128), grad_k=min(bk, 64), grad_v=min(bv, 64), scores_v=min(bv, 64),
            prep=Launch(4), forward=scan, recompute=scan, reverse=scan, grad=Launch(4), scores=Launch(4), chip=chip,
        )  # fmt: skip
    # Narrow V blocks only where all programs still run at once: one program fills a multiprocessor. K above 128 leaves
    # room for the tiles of half a chunk only.
    block_v = 128 if bv > 64 and not few else min(bv, 64)
    step = 32 if bk > 128 else 64
    stages = _stages(chip, step, bk, block_v, 3, read)
    if stages == 1:
        block_v = min(bv, 64)
        # Descriptor loads that nothing pipelines have gone wrong before (findings/gdn-forward, lesson 8).
        descriptors = False
    scan = Launch(8 if block_v > 64 else 4, stages)
    if bk > 128:
        return ScalarPlan(
            chunk=64, step=step, descriptors=descriptors, dot=chip.wide, inverse=inverse, block_k=bk, block_v=block_v,
            # Without q and A two narrow blocks share a multiprocessor.
            again_v=min(bv, 64), prep_k=bk, grad_k=64, grad_v=min(bv, 64), scores_v=min(bv, 64),
            prep=Launch(4, 1, 168), forward=scan, recompute=Launch(4, stages), reverse=scan, grad=Launch(4, 2, 168),
            scores=Launch(4), chip=chip, groups=_groups(chip, dtype, K, V, few, read),
        )  # fmt: skip
    # The recomputing scan has no q and no A, so two narrow blocks share a multiprocessor. A read key leaves no room for
    # that, but it may run one step further ahead.
    again, again_v = scan, block_v
    if not read and block_v > 64 and descriptors and 2 * (_again_bytes(bk) + 1024) <= chip.smem + 1024:
        again, again_v = Launch(4, 3), 64
    if read and stages == 2 and 3 * 2 * 64 * (2 * bk + block_v + 64) + 2 * block_v * (bk + 64) <= chip.smem:
        again = Launch(scan.warps, 3)
    # A third tile of keys leaves the forward scan room for two chunks on their way, or for four halves of one.
    forward, forward_step = scan, step
    if read and stages == 2 and block_v > 64 and descriptors:
        forward, forward_step = Launch(scan.warps, 4), 32
    # Where tiles are small, registers decide whether three programs share a multiprocessor.
    grad = Launch(4, 1, 168) if max(bk, bv) <= 64 and not read else Launch(4)
    return ScalarPlan(
        chunk=64, step=step, descriptors=descriptors, dot=chip.wide, inverse=inverse, block_k=bk, block_v=block_v,
        again_v=again_v, prep_k=bk, grad_k=bk, grad_v=min(bv, 128), scores_v=min(bv, 64), prep=Launch(4, 1, 128),
        forward=forward, recompute=again, reverse=scan, grad=grad, scores=Launch(4), chip=chip,
        forward_step=forward_step,
        chunk_groups=dtype == torch.bfloat16 and K == V == 128 and _groups(chip, dtype, K, V, few, read) > 0,
        groups=_groups(chip, dtype, K, V, few, read),
        # With a read key, and of 64 channels where heads fill the chip, Triton's is faster: 0.347 ms against 0.373, and
        # 0.265 against 0.281.
        groups_again=not read and (few or K != 64),
    )  # fmt: skip


def _groups(chip: Chip, dtype: torch.dtype, K: int, V: int, few: bool, read: bool) -> int:
    """Groups of four warps in a program of the state passes in Gluon; 0: there is none for such tiles.

    Two groups share the tiles of keys, unless there are too few heads to fill the chip with pairs. Of 64 channels two
    programs of one group share a multiprocessor; of 256 there is no room for a read key."""
    known = chip.descriptors and chip.arch // 10 == 9 and dtype in (torch.bfloat16, torch.float16)
    if not known or K not in (64, 128, 256) or V % (64 if K == 64 else 128) or (read and K > 128):
        return 0
    return 1 if few or K == 64 else 2


def _again_bytes(block_k: int) -> int:
    """Shared memory of the recomputing scan for 64 columns of V, with three stages: k and T thrice, v twice, the state
    and u on their way out, scalars and barriers."""
    return 2 * 64 * (3 * block_k + 2 * 64 + 3 * 64 + block_k + 64) + 600


def long_plan(plan: ScalarPlan, K: int, V: int) -> ScalarPlan:
    """The plan of the form of a call for keys that float16 has no room for: in float32, over the same chunks."""
    fp32 = scalar_plan(plan.chip, torch.float32, K, V, plan.chip.sms, False)
    return replace(fp32, chunk=plan.chunk, grad_k=plan.grad_k)


def _stages(chip: Chip, chunk: int, block_k: int, block_v: int, most: int, read: bool) -> int:
    """How many steps of a scan fit in shared memory beside the tile that is stored: q, k, v, T and A of a step."""
    step = 2 * chunk * ((3 if read else 2) * block_k + block_v) + 2 * 2 * chunk * chunk
    return max(1, min(most, (chip.smem - 2 * block_k * block_v) // step))


def time_segments(plan: ScalarPlan, chip: Chip, heads: int, V: int, chunks: int) -> int:
    """Stretches of time that run side by side: 1 unless few heads leave most of the chip idle over a long sequence."""
    programs = heads * -(-V // plan.block_v)
    if plan.block_k > 128 or plan.chunk < 64:
        return 1
    return stretches(programs, chip, chunks)
