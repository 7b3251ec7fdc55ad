# SPDX-License-Identifier: MIT
# ruff: noqa: E402  (the path comes first)
"""Does `fla warmup` leave anything to compile? Answered without a GPU, for one form of one function.

`offline_warmup.py FUNCTION FORM [--head-dim D]` compiles for sm90 what the command would, through a driver that runs
nothing (`stub_driver`), then makes calls of other sizes, dense and packed, and says what those compiled. Minutes; the
kernels land in TRITON_CACHE_DIR.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import torch
from stub_driver import stub_driver

SIZES = ((100, 3), (5000, 8), (2048, 16), (20000, 2), (1, 1), (64, 300), (77, 100))


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("function", help="such as gated_delta_rule.chunk_gated_delta_rule")
    ap.add_argument("form", help="such as all_in_kernel; fla warmup --list names them")
    ap.add_argument("--head-dim", default="32")
    args = ap.parse_args()
    torch.set_num_threads(1)
    with stub_driver():
        from fla.cli import _warm
        from fla.ops._common.size_classes import SizeClass, size_classes

        (task,) = _warm.tasks(
            [args.function],
            dtypes=["bfloat16"],
            dims=[args.head_dim],
            groups=[1],
            forms=[args.form],
            flags={},
            gates="float32",
            backward=True,
        )
        print(_warm.run_task(task, "cpu"), flush=True)
        known = _warm.cached_kernels()
        others = [
            SizeClass(f"T{T} H{H}{' packed' if packed else ''}", T, H, (T // 3, 0, T - T // 3) if packed else None)
            for T, H in SIZES
            for packed in (False, True)
        ]
        # The command's own calls, at other sizes.
        import fla.ops._common.size_classes as classes

        classes.size_classes = lambda chip: tuple(others)
        left = 0
        for i, other in enumerate(others):
            outcome = _warm.run_task(task, "cpu", i)
            new = _warm.cached_kernels() - known
            known |= new
            left += len(new)
            print(f"{other.name}: {outcome.calls} calls {outcome.error} {len(new)} new", flush=True)
        classes.size_classes = size_classes
    print("nothing is left to compile" if not left else f"{left} kernels were not compiled by the command")
    return left > 0


if __name__ == "__main__":
    sys.exit(main())
