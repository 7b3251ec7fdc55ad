# SPDX-License-Identifier: MIT
"""Launch policy of the vector-decay kernels: a pure rule, no tuning and no GPU needed."""

from __future__ import annotations

from dataclasses import dataclass

from fla.ops._common.policy import Chip, Launch, planned, pow2


@dataclass(frozen=True)
class VectorPlan:
    """How one call is launched.

    Attributes:
        kp, vp: padded head dimensions.
        kb: channels that `vector_prep` holds at a time.
        loop: it runs as a loop of one turn, with copies in the background.
        squares: where norms are stored, they come from the diagonals of products.
        bv, bv_bwd, bv_map: V blocks of the scan, the reverse scan and the summary of a time segment.
        gkb: channels of a program of the gradient kernel.
        vb: V block of the gradient kernel.
        segments: parts along time (1: no split).
        tma, grad_tma, out_tma: copy tiles by descriptor; the gradient kernels, straight-line code, would wait for each
            tile they read (grad_tma), and write all three results (out_tma).
        seekers: programs that look for chunks of strong gates, an odd number: their strides meet all heads.
        score: operand type of the scores, "bf16", "fp16" or "fp32".
        groups: groups of four warps, 64 columns of V each, of the state passes in Gluon; 0: those passes are Triton's.
        prec: ``input_precision`` of fp32 products; gprec and iprec: of the sums of gates and of the inverse.
    """

    kp: int
    vp: int
    kb: int
    loop: bool
    squares: bool
    bv: int
    bv_bwd: int
    bv_map: int
    gkb: int
    vb: int
    segments: int
    tma: bool
    grad_tma: bool
    out_tma: bool
    seekers: int
    score: str
    gscore: str
    prec: str
    gprec: str
    iprec: str
    prep: Launch
    scan: Launch
    scan_bwd: Launch
    scores: Launch
    grad: Launch
    merge: Launch
    groups: int = 0


@planned
def plan(
    chip: Chip,
    dtype: str,
    K: int,
    V: int,
    *,
    sequences: int,
    heads: int,
    length: int,
    exact: bool,
    normed: bool,
    varlen: bool = False,
    aligned: bool = True,
    gated: bool = False,
    light: bool = False,
    erase: bool = False,
) -> VectorPlan:
    """The plan of a call: ``dtype`` of q, k, v ("bfloat16", "float16", "float32"), head dims, number and length of the
    sequences, value heads, whether any gate must be exact, whether q and k are normed in the op and the gate is made
    there (``light``: of 16 bits, in tiles that need no masks), and whether the read key has a gate of its own."""
    half = dtype != "float32"
    interpreter = chip.vendor == "interpreter"
    # From rows of 32 bytes in shared memory ptxas 12.8 has read the wrong ones (benchmarks/ops/sass_descriptors.py).
    least = 32 if half and not interpreter else 16
    kp, vp = pow2(K, least), pow2(V, least)
    tma = half and aligned and chip.descriptors
    if half:
        # The fixed anchor needs bf16's exponents. The tree's factors are at most 1: fp16 keeps its mantissa there.
        score = "fp16" if exact and dtype == "float16" else "bf16"
        gscore = "bf16"
        prec, gprec = "tf32", "fp16"
        iprec = "fp16" if normed else chip.wide
    else:
        score = gscore = "fp32"
        prec = gprec = iprec = chip.exact
    if interpreter:
        # bf16 products are wrong in the interpreter
        gscore = "fp32"
        score = "fp32" if score == "bf16" else score
        prec = "ieee"
        gprec = "fp16" if half else "ieee"
        iprec = "fp16" if half and normed else "ieee"
    wide = kp > 128
    kb = min(kp, 128 if half and not exact else 64)
    # Measured on sm90; it needs 74 KB of shared memory. The interpreter runs what is launched there.
    # With 32 channels ptxas 12.8 takes a descriptor of the loop from the wrong register: an illegal address.
    measured = tma and chip.arch == 90 and kp >= 64
    loop = half and not exact and not erase and kb == kp and (interpreter or measured)
    # With 32 channels ptxas 12.8 builds descriptors of the sums of gates from a register that nothing has set, where a
    # product of a tile with itself has had the same address: an illegal address.
    squares = score == "bf16" and kp >= 64
    # Few sequences and heads: more, smaller programs; otherwise the states' gradients want the widest rows that fit.
    small = chip.smem < 200_000
    few = small or sequences * heads * (vp // min(vp, 64)) <= chip.sms
    bv = min(vp, (128 if tma and wide and not few else 64) if half else 32)
    # In float32 two tiles of 32 columns leave ptxas with 11 KB of spills (128 channels), of 16 with next to none.
    bv_bwd = min(vp, 16 if not half else (64 if few else 128) if tma else (64 if chip.arch < 90 else 32))
    # 32 rows keep the exact form on the warp-wide matrix instructions. With 64, ptxas 12.8 (triton 3.6) makes the
    # descriptor of a shared-memory operand of its levels from the wrong register: wrong gradients, or a fault.
    gkb = min(kp, 32 if half and exact else 64)
    vb = min(vp, (64 if wide else 128) if half else 32)
    # Three programs a multiprocessor pay in the gradients too. With wide V or the exact form there is no room for them,
    # and with the gate made beside only where nothing is masked.
    three = half and not exact and (light or not gated) and vb == vp and gkb == 64
    programs = sequences * heads * (vp // bv)
    segments = 1
    # The summaries cost more than the scan, so split only where it fills an idle chip.
    if not interpreter and not wide and (sequences == 1 or not varlen):
        parts = min(2 * chip.sms // max(programs, 1), length // 2048, 16)
        segments = parts if parts >= 4 else 1
    return VectorPlan(
        kp=kp,
        vp=vp,
        kb=kb,
        loop=loop,
        squares=squares,
        bv=bv,
        bv_bwd=bv_bwd,
        bv_map=min(kp, vp, 64 if half else 32),
        gkb=gkb,
        vb=vb,
        segments=segments,
        tma=tma,
        grad_tma=False,
        out_tma=tma,
        seekers=2 * chip.sms + 1,
        score=score,
        gscore=gscore,
        prec=prec,
        gprec=gprec,
        iprec=iprec,
        # Three programs a multiprocessor pay in the loop, and where the gate is made beside.
        prep=Launch(4, 1, 168 if loop or (half and gated and not exact and not wide and chip.arch >= 90) else None),
        scan=Launch(8, 3) if bv >= 128 else Launch(4, 3 if tma and not wide else (1 if small and wide else 2)),
        scan_bwd=Launch(8, 2 if wide else 4)
        if bv_bwd >= 128
        else Launch(4, 3 if tma and not wide and not small else (1 if small and wide else 2)),
        scores=Launch(2, 1),
        grad=Launch(4, 1, 168 if three and chip.arch >= 90 else None),
        merge=Launch(4, 2),
        groups=_groups(tma and chip.arch == 90, K, V, few),
    )


def _groups(known: bool, K: int, V: int, few: bool) -> int:
    """Two groups share the tiles, unless there are too few heads to fill the chip with pairs."""
    if not known or K != 128 or V not in (128, 256):
        return 0
    return 1 if few else 2
