# SPDX-License-Identifier: MIT
"""What a dispatched call costs over calling the function itself, as a ratio to a bare ``*args, **kwargs`` wrapper.

Nine arguments of which five tensors; medians of interleaved rounds in one process. Exits with 1 when a goal is missed.

    python benchmarks/dispatch_overhead.py [--json] [--rounds 15]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from fla.backends import BaseBackend, CallFacts, Capability, dispatch, last_decision, register

GOALS = {"no backend": 3.0, "six ruled out by capability": 7.0, "six whose verifiers reject": 17.0}


def make_op(operation: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def chunk_toy(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        scale: float | None = None,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: torch.Tensor | None = None,
    ) -> Any:
        return q

    return chunk_toy, dispatch(operation, facts=CallFacts())(chunk_toy)


class Ruled(BaseBackend):
    capability = Capability(device_types=("cuda",), head_dims=((128, 128),))

    def chunk_toy(
        self, q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None
    ) -> Any:
        raise AssertionError("a rejected backend ran")


class Rejecting(BaseBackend):
    def chunk_toy_verifier(
        self, q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None
    ) -> tuple[bool, str | None]:
        if q.shape[-1] != 128:
            return False, "head dimension must be 128"
        return True, None

    chunk_toy = Ruled.chunk_toy


def populate(operation: str, base: type[BaseBackend]) -> None:
    for i in range(6):
        kind = type(f"Backend{i}", (base,), {"backend_type": f"b{i}", "env_var": f"FLA_BENCH_B{i}", "priority": i})
        register(operation, kind())


def bare(f: Callable[..., Any]) -> Callable[..., Any]:
    def w(*a: Any, **k: Any) -> Any:
        return f(*a, **k)

    return w


def per_call(f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], calls: int) -> float:
    # Processor time: what other processes do on the machine is not ours to report.
    began = time.thread_time()
    for _ in range(calls):
        f(*args, **kwargs)
    return (time.thread_time() - began) / calls * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--calls", type=int, default=1000)
    options = parser.parse_args()

    x = torch.zeros(1, 16, 2, 64)
    args = (x, x, x, x, x[..., 0])
    kwargs = {"scale": 1.0, "initial_state": None, "output_final_state": True, "cu_seqlens": None}
    direct, none = make_op("bench_none")
    _, ruled = make_op("bench_ruled")
    _, rejecting = make_op("bench_rejecting")
    populate("bench_ruled", Ruled)
    populate("bench_rejecting", Rejecting)
    forms = {"direct": direct, "bare wrapper": bare(direct)}
    forms |= dict(zip(GOALS, (none, ruled, rejecting), strict=True))
    for name, form in forms.items():
        per_call(form, args, kwargs, 200)
        if name in GOALS:
            decision = last_decision()
            assert decision is not None
            assert decision.backend == "torch", decision
            assert len(decision.rejections) == (0 if name == "no backend" else 6), decision

    rounds: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(options.rounds):
        for name, form in forms.items():
            rounds[name].append(per_call(form, args, kwargs, options.calls))
    base = statistics.median(b - d for b, d in zip(rounds["bare wrapper"], rounds["direct"], strict=True))
    rows = []
    for name, goal in GOALS.items():
        cost = statistics.median(c - d for c, d in zip(rounds[name], rounds["direct"], strict=True))
        rows.append({"case": name, "us": round(cost, 3), "ratio": round(cost / base, 2), "goal": goal})
    missed = [row["case"] for row in rows if row["ratio"] > row["goal"]]
    if options.json:
        print(json.dumps({"bare_us": round(base, 3), "rows": rows, "missed": missed, "torch": torch.__version__}))
    else:
        print(f"python {platform.python_version()}, torch {torch.__version__}; bare wrapper {base:.3f} us over direct")
        for row in rows:
            state = "missed" if row["case"] in missed else "ok"
            print(f"{row['case']:30s} {row['us']:7.3f} us  {row['ratio']:6.2f}x  (goal {row['goal']:.0f}x) {state}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
