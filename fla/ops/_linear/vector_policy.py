# SPDX-License-Identifier: MIT
"""Launch policy of the kernels of the linear engine with a decay per channel: pure rules, no tuning, no GPU needed."""

from __future__ import annotations

from dataclasses import dataclass

from fla.ops._common.policy import Chip, Launch, planned, pow2, stretches


@dataclass(frozen=True, eq=False)
class VectorPlan:
    """How one class of calls is launched.

    Attributes:
        chunk: tokens a chunk.
        kp, vp: padded head dimensions.
        kb: channels that `vector_prep` holds at a time.
        per: chunks of a program of `vector_prep` at most, where there are enough; it prefetches the next one.
        bv, bv_save: V blocks of the scans with an output, and of those that only write states or summaries.
        gkb, vb: channels of a program of the gradient kernel, and its V block.
        tma: tiles go through descriptors.
        fast: 0: all chunks take the tree; 1: those with mild gates the short form; 2: all are known to be mild.
        score, gscore: operand types of the scores and of the gradient kernel ("bf16", "fp16", "fp32").
        prec, gprec: ``input_precision`` of fp32 products; precision of the sums of gates.
    """

    chunk: int
    kp: int
    vp: int
    kb: int
    per: int
    bv: int
    bv_save: int
    gkb: int
    vb: int
    tma: bool
    fast: int
    score: str
    gscore: str
    prec: str
    gprec: str
    prep: Launch
    scan: Launch
    save: Launch
    grad: Launch


def vector_plan(chip: Chip, dtype: str, K: int, V: int, *, heads: int, aligned: bool = True) -> VectorPlan:
    """The plan of a call: ``dtype`` of q, k, v, head dims, sequences times heads, whether descriptors can be used.

    Of ``heads`` only whether they fill the chip matters.
    """
    return _plan(chip, dtype, K, V, 2 * heads <= chip.sms, aligned)


@planned
def _plan(chip: Chip, dtype: str, K: int, V: int, few: bool, aligned: bool) -> VectorPlan:
    half = dtype != "float32"
    interpreter = chip.vendor == "interpreter"
    kp, vp = pow2(K), pow2(V)
    hopper = chip.vendor == "nvidia" and chip.arch // 10 in (9, 10)
    tma = half and aligned and chip.descriptors and kp <= 256
    if half:
        # bf16 for its range: factors of mild gates lie in 2^-64 .. 2^64.
        score = gscore = "fp32" if interpreter else "bf16"
        prec = "ieee" if interpreter else "tf32"
        gprec = "fp16"
    else:
        score = gscore = "fp32"
        prec = gprec = "ieee" if interpreter else chip.exact
    if half:
        bv = min(vp, (128 if hopper and not few else 64) if kp <= 128 else 32 if kp <= 256 else 16)
        bv_save = min(vp, 64 if kp <= 256 else 16)
    else:
        # Wider blocks spill: each product of fp32 operands is three. The interpreter has no registers.
        bv = min(vp, 64 if interpreter else 16)
        bv_save = min(vp, 32 if kp <= 128 else 16)
    chunk = 64 if half else 32
    # On sm100 stored tiles take more shared memory, and Triton 3.7 cannot pipeline a loop of one product that is read.
    blackwell = chip.vendor == "nvidia" and chip.arch // 10 == 10
    scan = Launch(8 if bv >= 128 or kp > 128 else 4, _stages(chip, chunk, kp, bv, half, True, 2 if blackwell else 3))
    save = Launch(8 if kp > 128 else 4, _stages(chip, chunk, kp, bv_save, half, False, 1 if blackwell else 3))
    return VectorPlan(
        chunk=chunk,
        kp=kp,
        vp=vp,
        kb=min(kp, 64 if half or interpreter else 32),
        per=8 if tma else 1,
        bv=bv,
        bv_save=bv_save,
        gkb=min(kp, 64 if half or interpreter else 16),
        vb=min(vp, 128 if half else 32),
        tma=tma,
        fast=1,
        score=score,
        gscore=gscore,
        prec=prec,
        gprec=gprec,
        prep=Launch(4, 3 if tma else 1),
        scan=scan,
        save=save,
        grad=Launch(4),
    )


def _stages(chip: Chip, chunk: int, kp: int, bv: int, half: bool, output: bool, most: int) -> int:
    """How many steps of a scan fit in shared memory beside the tile that is stored."""
    size = 2 if half else 4
    step = size * (chunk * (kp * (2 if output else 1) + bv) + (chunk * chunk if output else 0))
    rest = size * bv * (chunk + kp)
    return max(1, min(most, (chip.smem - rest - 1024) // step))


def time_segments(plan: VectorPlan, chip: Chip, heads: int, chunks: int) -> int:
    """Stretches of time that run side by side: 1 unless few heads leave most of the chip idle over a long sequence."""
    if plan.kp > 128 or chip.vendor == "interpreter":
        return 1
    return stretches(heads * (plan.vp // plan.bv), chip, chunks)
