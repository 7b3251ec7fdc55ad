# SPDX-License-Identifier: MIT
# ruff: noqa: E402  (the path comes first)
"""Compile the norm, elementwise, rotary and token shift kernels for chips that are not there.

`compile_rows.py [arch ...]`: registers, spills and the widths of global loads and stores.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "ops"), str(Path(__file__).parents[2])]

import torch
from offline import offline

from fla.modules._norm import engine as norm_engine
from fla.modules._pointwise import engine as pointwise
from fla.modules._shift.engine import shift
from fla.modules.rotary.engine import rotate
from fla.ops._common import policy

BF = torch.bfloat16


def x(*shape: int, dtype: torch.dtype = BF) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def calls(arch: str) -> None:
    chip = policy.CHIPS[arch]
    norm_engine.chip_of = lambda device: chip
    N = norm_engine.NormCall
    for D, n in ((4096, 8192), (128, 99999), (2048, 20000), (8192, 4096), (16384, 4096), (128, 64), (1000, 20000)):
        s, w = x(n, D), x(D)
        print(f"rms {D}")
        norm_engine.norm_forward(N(1), s, w, None, None, None)
        norm_engine.norm_backward(N(1), s, None, s, w, None, None, BF)
        if D in (128, 4096):
            print(f"gated {D}")
            norm_engine.norm_forward(N(1, 1), s, w, None, None, s)
            norm_engine.norm_backward(N(1, 1), s, None, s, w, None, s, BF)
            print(f"l2, layer residual {D}")
            norm_engine.norm_forward(N(2), s, None, None, None, None)
            norm_engine.norm_backward(N(2), s, None, s, None, None, None, BF)
            norm_engine.norm_backward(N(0), s, s, s, w, w, None, BF, BF)
    print("swiglu, gelu, power")
    a = x(8192, 4096)
    for op, y in ((1, a), (5, None), (6, a)):
        pointwise.pointwise_forward(op, a, y)
        pointwise.pointwise_backward(op, a, y, a)
    print("halves")
    pointwise.pointwise_forward(1, *x(4096, 2048).chunk(2, -1))
    print("rotary")
    for il in (False, True):
        rotate(x(4, 2048, 32, 128), x(2048, 64), x(2048, 64), 0, None, il, False, False)
        rotate(x(1, 2048, 3, 128), x(2048, 64), x(2048, 64), 0, torch.tensor([0, 2048]), il, False, False)
    print("shift")
    shift(x(4, 2048, 4096), None, None, False, False)


def main() -> None:
    for arch in sys.argv[1:] or ["sm90"]:
        with offline(arch) as seen:
            calls(arch)
        for c in seen:
            ptx = c.kernel.asm["ptx"]
            widths = Counter(re.findall(r"(?:ld|st)\.global[\w.:]*?((?:\.v[248])?\.b\d+)", ptx))
            print(arch, c, dict(widths))


if __name__ == "__main__":
    main()
