# SPDX-License-Identifier: MIT

"""Time the kernels of norms, activations and rotary embeddings on a GPU by launch; whole calls are in table.py.

`time_rows.py [variants] [torch]`, the latter for calls of torch of the same traffic. `time_rows.py compile I N`
launches every N-th variant from the I-th once, to fill the compiler's cache.

Times are medians of CUDA events around the call, with the L2 cache flushed between calls.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

BF = torch.bfloat16
N, D = 8192, 4096


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(BF).requires_grad_()


def median_ms(fn: Callable[[], Any], repeat: int = 40) -> float:
    for _ in range(3):
        fn()
    flush = torch.empty(128 << 20, dtype=torch.int8, device="cuda")
    events = []
    for _ in range(repeat):
        flush.zero_()
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        fn()
        b.record()
        events.append((a, b))
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in events)
    return times[len(times) // 2]


def host_us(fn: Callable[[], Any], repeat: int = 30) -> float:
    """Microseconds that the host takes for a call."""
    torch.cuda.synchronize()
    t = time.perf_counter()
    for _ in range(repeat):
        fn()
    t = time.perf_counter() - t
    torch.cuda.synchronize()
    return t / repeat * 1e6


class _Copy(torch.autograd.Function):
    """What an autograd function in Python costs by itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        (_,) = ctx.saved_tensors
        return dy.clone()


def of_torch() -> None:
    """Calls of torch of the same traffic."""
    F = torch.nn.functional
    weight = torch.ones(D, device="cuda", dtype=BF, requires_grad=True)
    for name, fn, n in (
        ("rms_norm", lambda x: F.rms_norm(x, (D,), weight, 1e-5), 1),
        ("product", torch.mul, 2),
        ("own function", _Copy.apply, 1),
    ):
        inputs = [randn(N, D) for _ in range(n)]
        dy = torch.randn_like(inputs[0])

        def both(fn: Any = fn, inputs: Any = inputs, dy: Any = dy) -> None:
            for x in inputs:
                x.grad = None
            fn(*inputs).backward(dy)

        with torch.no_grad():
            forward = median_ms(lambda fn=fn, inputs=inputs: fn(*inputs))
        print(f"torch {name:14s} forward {forward:.3f} with backward {median_ms(both):.3f}", flush=True)


def variants() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Single kernels by launch."""
    from fla.modules._norm import engine, policy
    from fla.modules._pointwise import engine as pointwise
    from fla.modules.rotary import engine as rotary
    from fla.ops._common.policy import Launch

    with torch.no_grad():
        x, y, w = randn(N, D).detach(), randn(N, D).detach(), randn(D).detach()
        xs, ys, ws = x.view(-1, 128), y.view(-1, 128), w[:128].clone()
    C = engine.NormCall
    calls = {
        "rms": (C(1), x, w, None),
        "gated": (C(1, 1), xs, ws, ys),
        "l2": (C(2), xs, None, None),
    }
    for name, (call, s, weight, g) in calls.items():
        base = policy.norm_plan(s.shape[-1], False)
        dy = torch.randn_like(s)
        for rows, warps, stages, per_sm in (
            (1, 8, 3, 2), (1, 4, 3, 2), (1, 4, 4, 2), (1, 4, 3, 3), (1, 8, 4, 1), (1, 4, 4, 1), (1, 8, 3, 3),
        ):  # fmt: skip
            if weight is None and per_sm != 4:
                continue
            plan = dataclasses.replace(
                base, back_rows=rows * base.back_rows, backward=Launch(warps, stages), per_sm=per_sm
            )
            args = (call, dy, None, s, weight, None, g, BF)
            yield (
                f"{name} bwd rows {plan.back_rows} warps {warps} stages {stages} per sm {per_sm}",
                lambda p=plan, a=args: engine.norm_backward(*a, plan=p),
            )
    for block, warps in ((2048, 4), (4096, 8)):

        def run(fn: Any, block: int = block, warps: int = warps) -> Any:
            pointwise.BLOCK, pointwise.WARPS = block, warps
            pointwise._forward_launch.cache_clear()
            pointwise._backward_launch.cache_clear()
            return fn()

        yield f"swiglu fwd {block} {warps}", lambda run=run: run(lambda: pointwise.pointwise_forward(1, x, y))
        yield f"swiglu bwd {block} {warps}", lambda run=run: run(lambda: pointwise.pointwise_backward(1, x, y, x))
    q = x.view(4, N // 4, 32, 128)
    cos, sin = torch.randn(N // 4, 64, device="cuda").to(BF), torch.randn(N // 4, 64, device="cuda").to(BF)
    for pairs, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 8), (4096, 4)):

        def turn(pairs: int = pairs, warps: int = warps) -> Any:
            rotary.PAIRS, rotary.WARPS = pairs, warps
            rotary._launch.cache_clear()
            return rotary.rotate(q, cos, sin, 0, None, False, False, False, q)

        yield f"rotary pair {pairs} {warps}", turn
    yield "rotary interleaved", lambda: rotary.rotate(q, cos, sin, 0, None, True, False, False, q)


def main() -> None:
    what = sys.argv[1:] or ["variants"]
    sys.path[:0] = [str(Path(__file__).parents[2])]
    print(torch.cuda.get_device_name(0), torch.__version__)
    if "compile" in what:
        mine, step = int(what[1]), int(what[2])
        for i, (_, fn) in enumerate(variants()):
            if i % step == mine:
                fn()
        torch.cuda.synchronize()
    if "variants" in what:
        for name, fn in variants():
            print(f"{name} {median_ms(fn, 20):.4f}", flush=True)
    if "torch" in what:
        of_torch()


if __name__ == "__main__":
    main()
