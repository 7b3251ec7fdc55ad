# SPDX-License-Identifier: MIT
# ruff: noqa: E402  (the path comes first)
"""What a call costs the host: the whole of it, and its parts.

`host_cost.py` on a GPU prints, per op, kernel time, what a caller with an idle queue pays beyond it, and host time;
beside them the least that any op pays there (`host_floor.py`), taken in the same rounds.
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
from typing import Any, NamedTuple

os.environ.pop("TRITON_INTERPRET", None)
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import torch
import torch.nn.functional as F
from torch import Tensor

BF = torch.bfloat16
Call = Callable[[], Any]


class Calls(NamedTuple):
    """Ways to call an op, its checks alone, and what it is given and the gradient of its output."""

    inference: Call
    forward: Call
    both: Call
    checks: Call
    leaves: list[Tensor]
    do: Tensor


def calls(device: str, B: int, T: int, H: int, D: int = 128, only: list[str] | None = None) -> dict[str, Calls]:
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
    out: dict[str, Calls] = {}
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

        out[name] = Calls(inference, forward, both, checks, leaves, do)
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
    from host_floor import floors
    from stub_driver import stub_driver

    torch.set_num_threads(1)
    with stub_driver():
        for name, fns in calls("cpu", 4, 64, 2, only=only).items():
            us = [cpu_us(f) for f in (*fns[:4], *floors(fns.leaves, fns.do, 0, 0))]
            print(
                f"{name:18s} inference {us[0]:6.1f} us  training forward {us[1]:6.1f}  forward + backward {us[2]:6.1f}"
                f"  (checks {us[3]:.1f}; the least of the others {us[4]:.1f}, {us[5]:.1f}, {us[6]:.1f})",
                flush=True,
            )
            for f, label in zip((fns.inference, fns.both), ("inference", "both"), strict=True):
                if profile == name:
                    print(label)
                    p = cProfile.Profile()
                    p.enable()
                    for _ in range(500):
                        f()
                    p.disable()
                    pstats.Stats(p).sort_stats("tottime").print_stats(45)


# Cycles that the GPU sleeps while the host gets ahead of it, also where that is slow.
_ONE, _BOTH = 1_500_000, 4_000_000


def caller_ms(fn: Call, flush: Tensor, n: int = 15) -> float:
    """Events around a call with an idle queue and a flushed L2."""
    times = []
    for _ in range(n):
        flush.zero_()
        torch.cuda.synchronize()
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        fn()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b))
    return statistics.median(times)


def host_ms(fn: Call, n: int = 15) -> float:
    times = []
    for _ in range(n):
        torch.cuda.synchronize()
        t = time.perf_counter()
        fn()
        times.append((time.perf_counter() - t) * 1e3)
    return statistics.median(times)


def one_thread(fn: Call) -> Call:
    """Without the engine's thread of the device, to which the backward is handed over."""

    def run() -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return fn()

    return run


def on_gpu(B: int, T: int, H: int, only: list[str] | None, rounds: int, turns: bool) -> None:
    """Processors of shared machines are now fast, now slow: all rows take turns in a round, and what a caller pays is
    the difference of two times of one round. Medians of rounds, with the best and the worst in brackets."""
    from check_delta import median_ms
    from host_floor import floors, one_launch

    flush = torch.empty(128 << 20, dtype=torch.int8, device="cuda")
    labels = ("inference", "training forward", "forward + backward")
    fns: dict[tuple[str, str], Call] = {}
    floor: dict[tuple[str, str], Call] = {}
    checks: dict[str, Call] = {}
    for name, op in calls("cuda", B, T, H, only=only).items():
        infer, both = (median_ms(fn, 15, hide) for fn, hide in ((op.inference, _ONE), (op.both, _BOTH)))
        checks[name] = op.checks
        for label, fn, least in zip(labels, op[:3], floors(op.leaves, op.do, infer, both - infer), strict=True):
            fns[name, label], floor[name, label] = fn, least
        alone = (name, "both, one thread")
        fns[alone], floor[alone] = one_thread(fns[name, labels[2]]), one_thread(floor[name, labels[2]])
    launch = one_launch(torch.empty(16, dtype=BF, device="cuda"))
    for fn in (launch, *floor.values()):
        for _ in range(3):  # compiled, watched, written out
            fn()
    rows: dict[Any, list[tuple[float, ...]]] = {key: [] for key in (*fns, *checks, "launch", "events")}
    print(torch.cuda.get_device_name(), torch.__version__, f"B{B} T{T} H{H}, {rounds} rounds", flush=True)
    for _ in range(rounds):
        if turns and not sys.stdin.readline():
            break
        rows["events"].append((caller_ms(lambda: None, flush),))
        rows["launch"].append((caller_ms(launch, flush) - median_ms(launch, 7, _ONE), host_ms(launch)))
        for key, fn in fns.items():
            pair = fn, floor[key]
            kernels = [median_ms(f, 7, _BOTH if "both" in key[1] or "+" in key[1] else _ONE) for f in pair]
            ours, least = (caller_ms(f, flush) - k for f, k in zip(pair, kernels, strict=True))
            rows[key].append((kernels[0], ours, least, ours - least, *map(host_ms, pair)))
        for name, fn in checks.items():
            rows[name].append((host_ms(fn),))
        if turns:
            print("done", flush=True)

    if not rows["events"]:
        return

    def column(values: tuple[float, ...]) -> str:
        return f"{statistics.median(values):.3f} [{min(values):.3f} {max(values):.3f}]"

    columns = {key: [column(values) for values in zip(*taken, strict=True)] for key, taken in rows.items()}
    print(f"no call, between two events: {columns['events'][0]} ms")
    print("one empty kernel: a caller pays {} ms, idle host {}".format(*columns["launch"]))
    for name, label in fns:
        kernels, *others = columns[name, label]
        text = "a caller pays {}, the least {}, beyond that {}; idle host {}, the least {}".format(*others)
        print(f"{name:16s} {label:18s} kernels {kernels[:5]} ms, {text}", flush=True)
    print("idle host, checks:", *(f"{name} {columns[name][0]}" for name in checks))


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--profile")
    ap.add_argument("--ops", nargs="*")
    ap.add_argument("--shape", type=int, nargs=3, default=(4, 2048, 16), metavar=("B", "T", "H"))
    ap.add_argument("--rounds", type=int, default=10)
    ap.add_argument("--turns", action="store_true", help="a round per line of standard input: versions take turns")
    args = ap.parse_args()
    with contextlib.suppress(BrokenPipeError):
        if torch.cuda.is_available():
            on_gpu(*args.shape, args.ops, args.rounds, args.turns)
        else:
            without_gpu(args.profile, args.ops)


if __name__ == "__main__":
    main()
