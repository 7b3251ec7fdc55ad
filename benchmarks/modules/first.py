# SPDX-License-Identifier: MIT
"""First calls of every module with an empty kernel cache, each in a process of its own.

`first.py [--jobs N] [CASE ...]` prints the seconds of the first forward, of the first backward, and of a call of
another length after that. torch, the module's class and the device are there before; whatever the call itself imports
and compiles counts. `first.py --offline` compiles for sm90 without a GPU (benchmarks/ops/stub_driver.py).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LIMIT = 2.0
HERE = Path(__file__).resolve().parent


def cases(device: str) -> dict[str, Callable[[], tuple[Callable[..., Any], Callable[[int], list[Any]]]]]:
    """Name: what makes the function and its arguments for a number of tokens."""
    import torch

    BF, D, V = torch.bfloat16, 1024, 4096

    def randn(*shape: int) -> Any:
        return torch.randn(shape, device=device, dtype=torch.float32).to(BF).requires_grad_()

    def module(name: str, *args: Any, **kw: Any) -> Any:
        from fla import modules

        made = getattr(modules, name)(*args, **kw)
        return made.to(device) if name == "RotaryEmbedding" else made.to(device, BF)

    def function(path: str, name: str) -> Any:
        import importlib

        return getattr(importlib.import_module(f"fla.modules.{path}"), name)

    def rows(n: int) -> list[Any]:
        return [randn(n, D)]

    def two(n: int) -> list[Any]:
        return [randn(n, D), randn(n, D)]

    def heads(n: int) -> list[Any]:
        return [randn(n * 8, 128), randn(n * 8, 128)]

    def tokens(n: int) -> list[Any]:
        return [randn(2, n // 2, D)]

    def q_and_k(n: int) -> list[Any]:
        return [randn(2, n // 2, 8, 128), randn(2, n // 2, 8, 128)]

    def classes(n: int) -> list[Any]:
        return [randn(n, V), torch.randint(0, V, (n,), device=device)]

    def packed(n: int) -> list[Any]:
        return [randn(1, n, D), None, None, None, False, torch.tensor([0, n // 2, n], device=device)]

    weight = randn(V, D) if device != "meta" else None

    def head(loss: Any, *more: Any) -> Any:
        return lambda x, target: loss(x, target, weight, *more)

    def targets(n: int) -> list[Any]:
        return [randn(n, D), torch.randint(0, V, (n,), device=device)]

    def grpo(n: int) -> list[Any]:
        return [
            randn(2, n + 1, V), torch.randn(2, n, device=device), torch.randint(0, V, (2, n), device=device),
            torch.randn(2, device=device),
        ]  # fmt: skip

    def kl(x: Any, y: Any) -> Any:
        return module("FusedKLDivLoss")(x, y.detach(), weight, weight.detach())

    return {
        "RMSNorm": lambda: (module("RMSNorm", D), rows),
        "LayerNorm with residual": lambda: (module("LayerNorm", D, bias=True), two),
        "GroupNorm": lambda: (module("GroupNorm", 8, D, bias=True), rows),
        "FusedRMSNormGated": lambda: (module("FusedRMSNormGated", 128), heads),
        "FusedLayerNormGated": lambda: (module("FusedLayerNormGated", 128, bias=True), heads),
        "L2Norm": lambda: (module("L2Norm"), rows),
        "swiglu": lambda: (function("activations", "swiglu"), two),
        "GatedMLP": lambda: (module("GatedMLP", D), rows),
        "ShortConvolution": lambda: (module("ShortConvolution", D, 4), tokens),
        "ShortConvolution, packed": lambda: (module("ShortConvolution", D, 4, bias=True), packed),
        "RotaryEmbedding": lambda: (module("RotaryEmbedding", 128), q_and_k),
        "token_shift": lambda: (function("token_shift", "token_shift"), tokens),
        "FusedCrossEntropyLoss": lambda: (module("FusedCrossEntropyLoss"), classes),
        "FusedCrossEntropyLoss, all options": lambda: (
            module("FusedCrossEntropyLoss", label_smoothing=0.1, lse_square_scale=1e-4, logit_softcapping=30.0),
            classes,
        ),
        "FusedLinearCrossEntropyLoss": lambda: (head(module("FusedLinearCrossEntropyLoss")), targets),
        "FusedKLDivLoss": lambda: (kl, two),
        "fused_grpo_loss": lambda: (function("grpo", "fused_grpo_loss"), grpo),
        "BitLinear": lambda: (module("BitLinear", D, D), rows),
        "FusedBitLinear": lambda: (module("FusedBitLinear", D, D), rows),
    }


def _cpu() -> float:
    own, others = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime


def child(name: str, offline: bool) -> None:
    sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent / "ops")]
    import torch

    device = "cpu" if offline else "cuda"

    def wait() -> None:
        if not offline:
            torch.cuda.synchronize()

    stub: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if offline:
        torch.set_num_threads(1)
        from stub_driver import stub_driver

        stub = stub_driver()
    with stub:
        fn, arguments = cases(device)[name]()
        # torch's own first times: the device, a product, and what a backward pass from a tensor imports.
        one = torch.ones(64, 64, device=device, requires_grad=True)
        torch.autograd.backward([one @ one], [torch.ones_like(one)])
        times = []
        # Offline the machine may be busy: seconds of a processor.
        clock = _cpu if offline else time.perf_counter
        for n in (2048, 1024):
            inputs = arguments(n)
            wait()
            t0 = clock()
            out = fn(*inputs)
            wait()
            t1 = clock()
            loss = [o for o in (out if isinstance(out, tuple) else (out,)) if o is not None]
            torch.autograd.backward(loss, [torch.ones_like(o) for o in loss])
            wait()
            times.append((t1 - t0, clock() - t1))
    (f, b), again = times[0], sum(times[1])
    print(f"FOUND {f:.2f} {b:.2f} {again:.2f}")


def run(name: str, offline: bool) -> tuple[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), "--child", *(["--offline"] if offline else []), name],
            env={**os.environ, "TRITON_CACHE_DIR": folder}, capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
    found = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    return (name, [float(t) for t in found[0].split()[1:]]) if found else (f"{name}: {done.stderr[-300:]}", [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--offline", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*")
    a = parser.parse_args()
    if a.child:
        child(a.names[0], a.offline)
        return
    sys.path[:0] = [str(HERE.parents[1])]
    names = a.names or list(cases("meta"))
    slow = []
    with ThreadPoolExecutor(a.jobs) as pool:
        for name, times in pool.map(lambda n: run(n, a.offline), names):
            if not times or max(times[:2]) > LIMIT:
                slow.append(name)
            print(name, *(f"{t:.2f}" for t in times), "OVER" if name in slow else "", flush=True)
    if slow:
        sys.exit(f"over {LIMIT} s: {', '.join(slow)}")


if __name__ == "__main__":
    main()
