# SPDX-License-Identifier: MIT
# ruff: noqa: E402  (the path comes first)
"""Compile what the policy of the linear engine with a decay per channel can choose for chips that are not there.

`compile_linear_vector.py [sm80 sm90 sm100 sm120]` prints registers, spills and shared memory of each kernel, and fails
where a kernel asks for more shared memory than the chip has.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import torch
from offline import Compiled, offline
from torch import Tensor

from fla.ops._common.policy import CHIPS
from fla.ops._linear import vector
from fla.ops._linear.vector_policy import vector_plan

BF, HF, F32 = torch.bfloat16, torch.float16, torch.float32
# name -> settings of `compile_call`
CASES: dict[str, dict[str, Any]] = {
    "128": {},
    "128, gates fp32, ragged": {"gates": F32, "tokens": 70},
    "128, few heads, split": {"heads": 4, "segments": 4},
    "128, bonus": {"bonus": True},
    "128 slots": {"K": 128, "slots": True},
    "64": {"K": 64, "V": 64},
    "64 to 128 fp16": {"K": 64, "dtype": HF, "gates": F32},
    "256": {"K": 256, "V": 256},
    "512": {"K": 512, "V": 512},
    "64 fp32": {"K": 64, "V": 64, "dtype": F32, "gates": F32},
    "128 fp32": {"dtype": F32, "gates": F32},
}


def compile_call(
    arch: str, K: int = 128, V: int = 128, dtype: torch.dtype = BF, gates: torch.dtype = BF, heads: int = 96,
    segments: int = 1, tokens: int = 64, bonus: bool = False, slots: bool = False,
) -> list[Compiled]:  # fmt: skip
    """The kernels of a forward and backward with initial and final state; ``slots``: of the pass into slots."""
    chip = CHIPS[arch]
    plan = vector_plan(chip, str(dtype).removeprefix("torch."), K, V, heads=heads)
    q, v = torch.zeros(1, tokens, 2, K, dtype=dtype), torch.zeros(1, tokens, 2, V, dtype=dtype)
    g, h0 = torch.zeros(1, tokens, 2, K, dtype=gates), torch.zeros(1, 2, K, V)
    u: Tensor | None = torch.zeros(2, K) if bonus else None
    real = vector.chip_of
    vector.chip_of = lambda _: chip
    try:
        with offline(arch) as seen:
            call = vector.VectorCall.make(q, v, 1.0, False, None, plan=plan, segments=segments)
            work = vector.Work(call, None if slots else q, q, v, g, u, None)
            work.prep()
            states = work.scan(v, h0, out=False, save=True)[1]
            assert states is not None
            if slots:
                work.grad(v, states, None, soft=True)
            else:
                work.scan(v, h0, final=work.state())
                work.grad(v, states, work.scan(v, h0, reverse=True, final=h0, save=True)[1])
    finally:
        vector.chip_of = real
    return seen


def main() -> None:
    too_much = False
    for arch in sys.argv[1:] or ["sm90"]:
        for name, settings in CASES.items():
            for compiled in compile_call(arch, **settings):
                over = compiled.shared > CHIPS[arch].smem
                too_much = too_much or over
                print(f"{arch} {name:24s} {compiled}{'  TOO MUCH' if over else ''}", flush=True)
    sys.exit(1 if too_much else 0)


if __name__ == "__main__":
    main()
