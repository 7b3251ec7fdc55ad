# SPDX-License-Identifier: MIT
# ruff: noqa: E402  (the path comes first)
"""Compile the kernels of the elementwise scan for chips that are not there: `compile_scan.py [arch ...]`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import torch
from offline import offline

from fla.ops._common import policy
from fla.ops._scan import autograd


def main() -> None:
    for arch in sys.argv[1:] or ["sm90"]:
        autograd.chip_of = lambda device, arch=arch: policy.CHIPS[arch]
        with offline(arch) as seen:
            for B, T, D, cu in ((1, 8192, 12288, None), (1, 8192, 512, [0, 8192]), (8, 1, 4096, None)):
                x = torch.zeros(B, T, D, dtype=torch.bfloat16)
                offsets = None if cu is None else torch.tensor(cu)
                h0 = torch.zeros(B, D)
                autograd.scan_forward(x, x, h0, offsets, True)
                autograd.scan_backward(x, x, x, h0, h0, offsets, True)
        for c in seen:
            print(arch, c)


if __name__ == "__main__":
    main()
