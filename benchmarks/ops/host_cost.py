# SPDX-License-Identifier: MIT
# ruff: noqa: E402  (the path comes first)
"""What a call costs the host: the whole of it, and its parts.

`host_cost.py` on a GPU prints, per op, kernel time, the time that a caller with an idle queue sees, and host time.
Without a GPU it launches through a driver that runs nothing (`stub_driver`), on CPU tensors: processor time of the same
path less the driver's own work. `--profile OP` adds the functions that cost most.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import os
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import torch
import torch.nn.functional as F
from torch import Tensor

BF = torch.bfloat16
Call = Callable[[], Any]


def calls(
    device: str, B: int, T: int, H: int, D: int = 128, only: list[str] | None = None
) -> dict[str, tuple[Call, Call, Call, Call]]:
    """Per op: inference, the forward of training, forward and backward, and its checks alone."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.gla import chunk_gla
    from fla.ops.kda import chunk_kda
    from fla.ops.simple_gla import chunk_simple_gla

    def inputs(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    x = {n: inputs(B, T, H, D).to(BF) for n in "qkv"}
    x["beta"] = inputs(B, T, H).sigmoid().to(BF)
    x["g"], x["gk"] = F.logsigmoid(inputs(B, T, H)), F.logsigmoid(inputs(B, T, H, D)).to(BF)
    do = torch.randn_like(x["v"])
    table: dict[str, tuple[Any, tuple[str, ...], dict[str, Any]]] = {
        "gated delta rule": (chunk_gated_delta_rule, ("q", "k", "v", "g", "beta"), {"use_qk_l2norm_in_kernel": True}),
        "kda": (chunk_kda, ("q", "k", "v", "gk", "beta"), {"use_qk_l2norm_in_kernel": True, "safe_gate": True}),
        "simple gla": (chunk_simple_gla, ("q", "k", "v", "g"), {}),
        "gla": (chunk_gla, ("q", "k", "v", "gk"), {}),
    }
    out: dict[str, tuple[Call, Call, Call, Call]] = {}
    for name, (op, names, kw) in table.items():
        plain = [x[n] for n in names]
        leaves = [t.clone().requires_grad_() for t in plain]

        def forward(op: Any = op, leaves: Any = leaves, kw: Any = kw) -> Any:
            return op(*leaves, **kw)[0]

        def both(forward: Any = forward, leaves: Any = leaves) -> Any:
            return torch.autograd.grad(forward(), leaves, do)

        def inference(op: Any = op, plain: Any = plain, kw: Any = kw) -> Any:
            with torch.no_grad():
                return op(*plain, **kw)[0]

        if only and name not in only:
            continue
        bound = op.op.signature.bind(*plain, **kw)
        bound.apply_defaults()
        values = tuple(bound.arguments.values())

        def checks(op: Any = op, values: Any = values) -> Any:
            return op.op.validate(*values)

        out[name] = (inference, forward, both, checks)
    return out


def cpu_us(fn: Call, n: int = 300) -> float:
    """Processor time of a call, the best of five loops (other processes disturb these)."""
    best = []
    for _ in range(3):
        fn()
    for _ in range(5):
        t = time.process_time()
        for _ in range(n):
            fn()
        best.append((time.process_time() - t) / n)
    return min(best) * 1e6


def without_gpu(profile: str | None, only: list[str] | None) -> None:
    from stub_driver import stub_driver

    torch.set_num_threads(1)
    with stub_driver():
        for name, fns in calls("cpu", 4, 64, 2, only=only).items():
            us = [cpu_us(f) for f in fns]
            print(
                f"{name:18s} inference {us[0]:6.1f} us  training forward {us[1]:6.1f}  forward + backward {us[2]:6.1f}"
                f"  (checks {us[3]:.1f})",
                flush=True,
            )
            for f, label in zip(fns[:3:2], ("inference", "both"), strict=True):
                if profile == name:
                    print(label)
                    p = cProfile.Profile()
                    p.enable()
                    for _ in range(500):
                        f()
                    p.disable()
                    pstats.Stats(p).sort_stats("tottime").print_stats(45)


def on_gpu(B: int, T: int, H: int, only: list[str] | None, rounds: int) -> None:
    """Processors of shared machines are now fast, now slow: ops take turns, and the best round stands beside all."""
    from check_delta import median_ms

    flush = torch.empty(128 << 20, dtype=torch.int8, device="cuda")

    def caller(fn: Call) -> list[float]:
        """Events around a call with an idle queue and a flushed L2."""
        times = []
        for _ in range(15):
            flush.zero_()
            torch.cuda.synchronize()
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            fn()
            b.record()
            torch.cuda.synchronize()
            times.append(a.elapsed_time(b))
        return times

    def host(fn: Call) -> list[float]:
        times = []
        for _ in range(15):
            torch.cuda.synchronize()
            t = time.perf_counter()
            fn()
            times.append((time.perf_counter() - t) * 1e3)
        return times

    def row(rounds: list[list[float]]) -> str:
        medians = sorted(statistics.median(r) for r in rounds)
        return f"{statistics.median(x for r in rounds for x in r):.3f} (best round {medians[0]:.3f})"

    print(torch.cuda.get_device_name(), torch.__version__, f"B{B} T{T} H{H}, {rounds} rounds")
    labels = ("inference", "training forward", "forward + backward", "checks")
    table = {
        (name, x): fn
        for name, fns in calls("cuda", B, T, H, only=only).items()
        for x, fn in zip(labels, fns, strict=True)
    }
    kernels = {key: median_ms(fn, 15, 1_500_000) for key, fn in table.items() if key[1] != "checks"}
    seen: dict[Any, tuple[list[list[float]], list[list[float]]]] = {key: ([], []) for key in table}
    for _ in range(rounds):
        for key, fn in table.items():
            if key in kernels:
                seen[key][0].append(caller(fn))
            seen[key][1].append(host(fn))
    for key, (callers, hosts) in seen.items():
        line = f"kernels {kernels[key]:.3f} ms  caller {row(callers)}  " if key in kernels else ""
        print(f"{key[0]:18s} {key[1]:18s} {line}idle host {row(hosts)}", flush=True)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--profile")
    ap.add_argument("--ops", nargs="*")
    ap.add_argument("--shape", type=int, nargs=3, default=(4, 2048, 16), metavar=("B", "T", "H"))
    ap.add_argument("--rounds", type=int, default=10)
    args = ap.parse_args()
    with contextlib.suppress(BrokenPipeError):
        if torch.cuda.is_available():
            on_gpu(*args.shape, args.ops, args.rounds)
        else:
            without_gpu(args.profile, args.ops)


if __name__ == "__main__":
    main()
