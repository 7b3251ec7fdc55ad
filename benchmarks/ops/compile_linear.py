# SPDX-License-Identifier: MIT
# ruff: noqa: E402  (the path comes first)
"""Compile what the policy of the linear engine with scalar decay can choose for chips that are not there.

`compile_linear.py [sm80 sm90 sm100 sm120]` prints registers, spills and shared memory of each kernel, and fails where a
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
from linear_reference import make_inputs
from offline import Compiled, offline

from fla.ops._common.policy import CHIPS
from fla.ops._linear import scalar
from fla.ops._linear.policy import scalar_plan
from fla.ops._linear.scalar import ScalarCall

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def compile_call(arch: str, dtype: torch.dtype, K: int, heads: int, segments: int, gate: str | None) -> list[Compiled]:
    """The kernels of a forward and backward with initial and final state."""
    chip = CHIPS[arch]
    plan = scalar_plan(chip, dtype, K, K, heads)
    x = make_inputs(1, 64, 1, K, dtype=dtype, initial=True, gate=gate)
    q, k, v, h0 = (x[n] for n in ("q", "k", "v", "initial_state"))
    g, gamma = x.get("g"), x.get("g_gamma")
    decay = 1 if g is not None else 2 if gamma is not None else 0
    with offline(arch) as seen:
        call = ScalarCall.make(k, v, K**-0.5, decay, False, None, chip=chip, plan=plan, segments=segments)
        sums = scalar.decay_sums(call, g)
        entry = scalar.entries(call, q, k, v, sums, gamma, h0)
        scalar.scan(call, q, k, v, sums, gamma, h0, entry, True, True, False)
        _, _, S = scalar.scan(call, q, k, v, sums, gamma, h0, entry, False, False, True)
        assert S is not None
        _, X = scalar.reverse(call, q, k, v, sums, gamma, h0, torch.empty_like(h0))
        scalar.gradients(call, q, k, v, g, sums, gamma, v, S, X)
    return seen


def main() -> int:
    ap = argparse.ArgumentParser()
    ap.add_argument("arch", nargs="*", default=["sm80", "sm90", "sm100", "sm120"])
    ap.add_argument("--dims", type=int, nargs="*", default=[64, 128, 256])
    ap.add_argument("--dtypes", nargs="*", default=["bf16", "fp32"])
    ap.add_argument("--gates", nargs="*", default=["token", "head", "none"])
    args = ap.parse_args()
    over = 0
    for arch in args.arch:
        for name in args.dtypes:
            for K in args.dims:
                # Few heads take narrower blocks; few heads over a long time are split. Gates differ little: one size.
                whole = ((1000, 1, "token"),)
                more = ((16, 1, "token"), (16, 8, "token"), (1000, 1, "head"), (1000, 1, "none"))
                for heads, segments, gate in whole if K != 128 or name == "fp32" else (*whole, *more):
                    if gate not in args.gates:
                        continue
                    print(f"{arch} {name} K = V = {K}, {gate} decay, {heads} heads, {segments} stretches", flush=True)
                    for c in compile_call(arch, DTYPES[name], K, heads, segments, None if gate == "none" else gate):
                        bad = c.shared > CHIPS[arch].smem
                        over += bad
                        print("  ", c, "TOO MUCH SHARED MEMORY" if bad else "", flush=True)
    return min(over, 1)


if __name__ == "__main__":
    sys.exit(main())
