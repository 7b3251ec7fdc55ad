# SPDX-License-Identifier: MIT
# ruff: noqa: E402  (the path comes first)
"""Compile what the policy of the linear engine with scalar decay can choose for chips that are not there.

`compile_linear.py [sm80 sm90 sm100 sm120]` prints registers, spills and shared memory of each kernel, and fails where a
kernel asks for more shared memory than the chip has.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import torch
from linear_reference import make_inputs
from offline import Compiled, offline
from offline import _tool as tool
from sass_descriptors import wrong_descriptors

from fla.ops._common.policy import CHIPS
from fla.ops._linear import scalar
from fla.ops._linear.policy import scalar_plan
from fla.ops._linear.scalar import Decays, ScalarCall

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def compile_call(
    arch: str, dtype: torch.dtype, K: int, V: int, heads: int, segments: int, gate: str | None, tokens: int = 64,
    change: dict[str, Any] | None = None,
) -> list[Compiled]:  # fmt: skip
    """The kernels of a forward and backward with both states; ``tokens`` no multiple of 64: those of tails too."""
    chip = CHIPS[arch]
    plan = scalar_plan(chip, dtype, K, V, heads)
    plan = dataclasses.replace(plan, **(change or {}))
    x = make_inputs(1, tokens, 1, K, V, dtype=dtype, initial=True, gate=gate)
    q, k, v, h0 = (x[n] for n in ("q", "k", "v", "initial_state"))
    g, gamma = x.get("g"), x.get("g_gamma")
    decay = 1 if g is not None else 2 if gamma is not None else 0
    with offline(arch) as seen:
        call = ScalarCall.make(k, v, K**-0.5, decay, False, None, chip=chip, plan=plan, segments=segments)
        decays = Decays(scalar.decay_sums(call, g), gamma)
        entry = scalar.entries(call, k, v, decays, h0)
        scalar.forward(call, q, k, v, decays, h0, entry, True)
        S, X, _ = scalar.states(call, q, k, v, v, decays, h0, h0, torch.empty_like(h0), entry)
        scalar.gradients(call, q, k, v, g, decays, v, S, X)
    return seen


def suspicious(compiled: Compiled) -> list[str]:
    """What `sass_descriptors` finds in the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(compiled.kernel.asm["cubin"])
        f.flush()
        sass = subprocess.run([tool("cuobjdump"), "-sass", f.name], capture_output=True, text=True).stdout
    return wrong_descriptors(sass)


def main() -> int:
    ap = argparse.ArgumentParser()
    ap.add_argument("arch", nargs="*", default=["sm80", "sm90", "sm100", "sm120"])
    ap.add_argument("--dims", nargs="*", default=["64", "128", "256", "512"], help="K, or KxV")
    ap.add_argument("--dtypes", nargs="*", default=["bf16", "fp32"])
    ap.add_argument("--gates", nargs="*", default=["token", "head", "none"])
    ap.add_argument("--tails", action="store_true", help="the kernels of ragged ends too")
    args = ap.parse_args()
    over = 0
    for arch in args.arch:
        for name in args.dtypes:
            for dims in args.dims:
                K, V = (int(n) for n in (dims if "x" in dims else f"{dims}x{dims}").split("x"))
                # Few heads take narrower blocks; few heads over a long time are split. Gates differ little: one size.
                whole = ((1000, 1, "token"),)
                more = ((16, 1, "token"), (16, 8, "token"), (1000, 1, "head"), (1000, 1, "none"))
                for heads, segments, gate in whole if K != 128 or name == "fp32" else (*whole, *more):
                    if gate not in args.gates:
                        continue
                    print(f"{arch} {name} K {K} V {V}, {gate} decay, {heads} heads, {segments} stretches", flush=True)
                    given = None if gate == "none" else gate
                    for c in compile_call(arch, DTYPES[name], K, V, heads, segments, given, 65 if args.tails else 64):
                        bad = c.shared > CHIPS[arch].smem
                        wrong = suspicious(c) if arch == "sm90" else []
                        over += bad
                        print("  ", c, "TOO MUCH SHARED MEMORY" if bad else "", *wrong[:1], flush=True)
    return min(over, 1)


if __name__ == "__main__":
    sys.exit(main())
