# SPDX-License-Identifier: MIT
# ruff: noqa: E402  (the path comes first)
"""Compile every configuration that the scalar-decay policy can choose for chips that are not there.

`compile_delta.py [sm80 sm90 sm100 sm120]` prints registers, spills and shared memory of each kernel, and fails where a
kernel asks for more shared memory than the chip has.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import torch
from delta_reference import make_inputs
from offline import Compiled, offline

from fla.ops._common.policy import CHIPS
from fla.ops._delta import scalar
from fla.ops._delta.policy import scalar_plan
from fla.ops._delta.scalar import ScalarCall

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def compile_call(
    arch: str, dtype: torch.dtype, K: int, heads: int, segments: int = 1, read: bool = False
) -> list[Compiled]:
    """The kernels of a forward and backward with initial and final state; ``read``: with a read key, as comba has."""
    chip = CHIPS[arch]
    plan = scalar_plan(chip, dtype, K, K, heads, True, read)
    x = make_inputs(1, 64, 1, None, K, dtype=dtype, initial=True, read=read)
    q, k, v, g, beta, h0 = (x[n] for n in ("q", "k", "v", "g", "beta", "initial_state"))
    p = x.get("p")
    with offline(arch) as seen:
        call = ScalarCall.make(
            k, v, K**-0.5, True, 0.0, False, None, chip=chip, plan=plan, segments=segments, read=read, before=read
        )  # fmt: skip
        T, A, sc, long = scalar.prepare(call, q, k, v, g, beta, None, None, True, p)
        entry = scalar.entries(call, q, k, v, T, A, sc, h0, p, long)
        scalar.scan(call, q, k, v, T, A, sc, h0, entry, True, True, False, p, long)
        _, _, S, U = scalar.scan(call, q, k, v, T, A, sc, h0, entry, False, False, True, p, long)
        dv, X = scalar.reverse(call, q, k, v, T, A, sc, h0, torch.empty_like(h0), p, long)
        assert S is not None
        assert U is not None
        scalar.gradients(call, q, k, v, g, beta, None, None, v, scalar.Passed(dv, S, U, X, sc), p, v, long)
    return seen


def main() -> int:
    ap = argparse.ArgumentParser()
    ap.add_argument("arch", nargs="*", default=["sm80", "sm90", "sm100", "sm120"])
    ap.add_argument("--dims", type=int, nargs="*", default=[64, 128, 256])
    ap.add_argument("--dtypes", nargs="*", default=["bf16", "fp32"])
    ap.add_argument("--read", action="store_true", help="with a read key of its own (comba)")
    args = ap.parse_args()
    over = 0
    for arch in args.arch:
        for name in args.dtypes:
            for K in args.dims:
                # Few heads take narrower blocks; few heads over a long time are split.
                for heads, segments in ((1000, 1),) if K != 128 or name == "fp32" else ((1000, 1), (16, 1), (16, 8)):
                    print(f"{arch} {name} K = V = {K}, {heads} heads, {segments} stretches", flush=True)
                    for c in compile_call(arch, DTYPES[name], K, heads, segments, args.read):
                        bad = c.shared > CHIPS[arch].smem
                        over += bad
                        print("  ", c, "TOO MUCH SHARED MEMORY" if bad else "", flush=True)
    return min(over, 1)


if __name__ == "__main__":
    sys.exit(main())
