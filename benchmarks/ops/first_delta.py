# SPDX-License-Identifier: MIT
"""First calls of the delta family with an empty kernel cache, in seconds.

Per op a fresh process that has imported torch alone and a cache folder of its own, one after the other: the first
forward, the first forward and backward after it, both again at another length, batch and head count of the same size
class, and the first forward and backward of another class. `first_delta.py [OP ...]`; `--jobs N` runs N at a time.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2])]

import torch  # noqa: E402

OPS = ("gdn", "kda bounded", "kda exact", "comba", "delta")


def _call(op: str, B: int, T: int, H: int, D: int = 128) -> tuple[str, str, list[torch.Tensor], dict[str, Any]]:
    import torch.nn.functional as F

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda")

    q, k, v, p = (normal(B, T, H, D).bfloat16() for _ in range(4))
    beta, g = normal(B, T, H).sigmoid().bfloat16(), F.logsigmoid(normal(B, T, H))
    gk = F.logsigmoid(normal(B, T, H, D)).bfloat16()
    room, name, x, flags = {
        "gdn": ("gated_delta_rule", "chunk_gated_delta_rule", [q, k, v, g, beta], {}),
        "kda bounded": ("kda", "chunk_kda", [q, k, v, gk, beta], {"safe_gate": True}),
        "kda exact": ("kda", "chunk_kda", [q, k, v, gk, beta], {}),
        "delta": ("delta_rule", "chunk_delta_rule", [q, k, v, beta], {}),
        "comba": ("comba", "chunk_comba", [q, k, v, p, g, beta], {}),
    }[op]
    return f"fla.ops.{room}", name, x, {"use_qk_l2norm_in_kernel": True, **flags}


def _timed(op: str, *shape: int, train: bool) -> float:
    room, name, x, flags = _call(op, *shape)
    x = [t.requires_grad_(train) for t in x]
    torch.cuda.synchronize()
    start = time.perf_counter()
    fn = getattr(importlib.import_module(room), name)
    with torch.set_grad_enabled(train):
        o = fn(*x, **flags)[0]
        if train:
            o.backward(torch.ones_like(o))
    torch.cuda.synchronize()
    return time.perf_counter() - start


def one(op: str) -> None:
    first, then = (_timed(op, 1, 8192, 96, train=train) for train in (False, True))
    row = [f"first forward {first:.2f}, then forward + backward {then:.2f}"]
    for what, shape in (
        ("new T", (1, 4096, 96)),
        ("new B", (2, 8192, 96)),
        ("new H", (1, 8192, 80)),
        ("few heads", (1, 32768, 4)),
        ("tails", (1, 8111, 96)),
    ):
        row.append(f"{what} {_timed(op, *shape, train=False):.3f} / {_timed(op, *shape, train=True):.3f}")
    print(f"{op:12s} " + "; ".join(row), flush=True)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("ops", nargs="*", default=OPS)
    ap.add_argument("--jobs", type=int, default=1)
    args = ap.parse_args()
    running: list[int] = []
    for op in args.ops:
        if len(running) >= args.jobs:
            os.waitpid(running.pop(0), 0)
        # torch is imported, CUDA is not touched yet: as good as a fresh process.
        pid = os.fork()
        if pid == 0:
            with tempfile.TemporaryDirectory() as folder:
                os.environ["TRITON_CACHE_DIR"] = folder
                torch.cuda.init()
                torch.ones(1, device="cuda").sum().item()
                try:
                    one(op)
                except Exception as error:
                    print(f"{op:12s} {type(error).__name__}: {error}"[:300], flush=True)
            os._exit(0)
        running.append(pid)
    for pid in running:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
