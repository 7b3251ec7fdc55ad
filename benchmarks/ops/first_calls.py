# SPDX-License-Identifier: MIT
"""First calls with an empty kernel cache, in seconds: inference; in another process forward and backward, then other
lengths, batches and head counts, and a first packed call. `first_calls.py [OP ...]`; every op in processes of its own,
JOBS (2) at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2])]

OPS = (
    "gated_delta_rule", "kda", "delta_rule", "comba", "simple_gla", "retention", "gla", "rwkv6", "gsa", "hgrn",
)  # fmt: skip
DELTA = ("gated_delta_rule", "kda", "delta_rule", "comba")


def inputs(op: str, B: int, T: int, H: int, D: int = 128) -> dict[str, Any]:
    import torch
    import torch.nn.functional as F

    def leaf(x: Any, dtype: Any = torch.bfloat16) -> Any:
        return x.to(dtype).requires_grad_()

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda")

    if op == "hgrn":
        return {"x": leaf(normal(B, T, H * D)), "g": leaf(F.logsigmoid(normal(B, T, H * D)))}
    x = {n: leaf(normal(B, T, H, D)) for n in ("r" if op == "rwkv6" else "q", "k", "v")}
    if op in DELTA:
        x["beta"] = leaf(normal(B, T, H).sigmoid())
    if op == "comba":
        x["p"] = leaf(normal(B, T, H, D))
    if op in ("simple_gla", "gated_delta_rule", "comba"):
        x["g"] = leaf(F.logsigmoid(normal(B, T, H)), torch.float32)
    if op in ("gla", "rwkv6", "kda"):
        x["w" if op == "rwkv6" else "g"] = leaf(F.logsigmoid(normal(B, T, H, D)))
    if op == "rwkv6":
        x["u"] = leaf(normal(H, D))
    if op == "gsa":
        x["s"], x["g"] = leaf(normal(B, T, H, 64)), leaf(F.logsigmoid(normal(B, T, H, 64)))
    return x


def one(op: str, train: bool) -> None:
    import importlib

    import torch

    from fla.backends import use_backend

    fn = getattr(importlib.import_module(f"fla.ops.{op}"), f"chunk_{op}")
    flags = {"use_qk_l2norm_in_kernel": True} if op in DELTA else {}
    if op == "kda":
        flags["safe_gate"] = True
    torch.empty(1, device="cuda")

    def step(*shape: int, **more: Any) -> tuple[float, float, float]:
        x = inputs(op, *shape)
        torch.cuda.synchronize()
        t = time.perf_counter()
        o = fn(**x, **flags, **more)[0]
        torch.cuda.synchronize()
        forward = time.perf_counter() - t
        do = torch.ones_like(o)
        torch.cuda.synchronize()
        b = time.perf_counter()
        torch.autograd.grad(o, list(x.values()), do)
        torch.cuda.synchronize()
        back = time.perf_counter() - b
        return forward, forward + back, time.perf_counter() - t

    with use_backend("triton", strict=True):
        if not train:
            x = inputs(op, 1, 2048, 96)
            torch.cuda.synchronize()
            t = time.perf_counter()
            with torch.no_grad():
                fn(**x, **flags)
            torch.cuda.synchronize()
            print(f"{op:11s} inference {time.perf_counter() - t:.2f} s")
            return
        first = step(1, 2048, 96)
        print(f"{op:11s} training: forward {first[0]:.2f} s, with backward {first[1]:.2f} s", end="", flush=True)
        for name, shape in (("length", (1, 4096, 96)), ("batch", (2, 2048, 96)), ("heads", (1, 2048, 80))):
            # The width of hgrn, which has no heads, is part of its kernels.
            if op != "hgrn" or name != "heads":
                print(f"; new {name} {step(*shape)[1]:.3f}", end="", flush=True)
        if op not in ("gsa", "hgrn"):
            cu = torch.tensor([0, 700, 2048], device="cuda")
            print(f"; packed {step(1, 2048, 96, cu_seqlens=cu)[1]:.3f}", end="")
        print()


def apart(op: str, kind: str) -> str:
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "TRITON_CACHE_DIR": cache}
        p = subprocess.run([sys.executable, __file__, kind, op], capture_output=True, text=True, env=env)
    return p.stdout.strip() or f"{op}: {p.stderr.strip()[-400:]}"


if __name__ == "__main__":
    if sys.argv[1:2] in (["train"], ["infer"]):
        one(sys.argv[2], sys.argv[1] == "train")
    else:
        jobs = [(op, kind) for op in sys.argv[1:] or OPS for kind in ("infer", "train")]
        with ThreadPoolExecutor(int(os.environ.get("JOBS", "2"))) as pool:
            for line in pool.map(apart, *zip(*jobs, strict=True)):
                print(line, flush=True)
