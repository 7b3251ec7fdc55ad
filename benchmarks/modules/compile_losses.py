# SPDX-License-Identifier: MIT
# ruff: noqa: E402  (the path comes first)
"""Compile the kernels of the losses and the short convolution for chips that are not there.

`compile_losses.py [sm80 sm90 sm100 sm120]` prints registers, spills and shared memory, and fails on a spill or where a
kernel asks for more shared memory than the chip has.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
sys.path[:0] = [str(Path(__file__).parents[1] / "ops"), str(Path(__file__).parents[2])]

import torch
from offline import Compiled, offline

from fla.modules._loss import launch as loss
from fla.modules.causal_conv1d import launch as conv
from fla.ops._common.policy import CHIPS

DTYPES = (torch.bfloat16, torch.float32)


def convolutions(arch: str, dtype: torch.dtype) -> None:
    for D, W in ((4096, 4), (100, 3)):
        x, w = torch.zeros(1, 128, D, dtype=dtype), torch.zeros(D, W, dtype=dtype)
        b, s = torch.zeros(D, dtype=dtype), torch.zeros(1, D, W, dtype=dtype)
        for full in (False, True):
            call, back = (
                conv.Call.make(x, W, None, conv.conv_plan(CHIPS[arch], 8192, D, backward)) for backward in (False, True)
            )
            bias, state, final = (b, s, s) if full else (None, None, None)
            conv.conv_fwd(call, x, w, bias, x if full else None, state, True)
            conv.conv_bwd(back, x, w, bias, state, x, final, True, True, True)
        conv.conv_final(call, x, s)
        conv.conv_state_grad(back, x, w, b, s, x, s, True)
        conv.conv_update(x[0], torch.zeros(128, D, W, dtype=dtype), None, w, b, True)


def losses(dtype: torch.dtype) -> None:
    for V in (131072, 50257, 300):
        z, each = torch.zeros(2, V, dtype=dtype), torch.zeros(2)
        target = torch.zeros(2, dtype=torch.int64)
        for options in (loss.Options(), loss.Options(0.1, 0.5, 1e-4, 30.0)):
            loss.cross_entropy(z, target, options, V, 0)
            loss.cross_entropy(z, target, options, V, 0, lse=each, dloss=each, grad=z.clone())
            loss.cross_entropy(z, target, options, V, 0, dloss=each, grad=z, warp=0.1)
            loss.cross_entropy(z, target, options, V, 0, dloss=each, grad=z)
        loss.divergence(z, z.clone(), 1.0, True)
    loss.scale_(z, each[0])


def main() -> int:
    bad: list[Compiled] = []
    for arch in sys.argv[1:] or ["sm80", "sm90", "sm100", "sm120"]:
        for dtype in DTYPES:
            with offline(arch) as seen:
                convolutions(arch, dtype)
                losses(dtype)
            print(arch, dtype)
            for kernel in seen:
                print(f"  {kernel}")
            bad += [k for k in seen if k.spills or k.shared > CHIPS[arch].smem]
    for kernel in bad:
        print("BAD", kernel)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
