# SPDX-License-Identifier: MIT

"""Time norms, activations and rotary embeddings on a GPU, beside fla-core and Liger-Kernel where they can be imported.

`time_rows.py [ours] [variants] [first] [compile]`: whole calls of `fla.modules`, forward and with backward, after a
correctness gate; kernels by launch; first calls (give an empty TRITON_CACHE_DIR); or everything once, to fill the
compiler's cache. `time_rows.py peer`, `liger`, `torch`: the same calls of the `fla` or `liger_kernel` that is on the
path, in a process of its own, or of torch. Names of cases limit these runs to them.

Times are medians of CUDA events around the call, with the L2 cache flushed between calls; the floor is the traffic of
inputs and outputs at 4.3 TB/s (H200). Gradients of all outputs are taken.
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
BANDWIDTH = 4.3e9  # bytes a millisecond


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


# Tensors of 64 MiB that the forward moves, and that the backward moves on top.
Case = tuple[str, Callable[..., Any], list[torch.Tensor], int, int]


def cases(library: str) -> Iterator[Case]:
    if library == "torch":
        F = torch.nn.functional
        weight = torch.ones(D, device="cuda", dtype=BF, requires_grad=True)
        yield "rmsnorm", lambda x: F.rms_norm(x, (D,), weight, 1e-5), [randn(N, D)], 2, 3
        yield "product", torch.mul, [randn(N, D), randn(N, D)], 3, 5
        yield "own function", _Copy.apply, [randn(N, D)], 2, 2
        return
    if library == "liger":
        from liger_kernel.ops import LigerSiLUMulFunction
        from liger_kernel.transformers import LigerRMSNorm

        yield "rmsnorm", LigerRMSNorm(D).to("cuda", BF), [randn(N, D)], 2, 3
        yield "swiglu", LigerSiLUMulFunction.apply, [randn(N, D), randn(N, D)], 3, 5
        return
    from fla.modules import FusedRMSNormGated, RMSNorm, RotaryEmbedding
    from fla.modules.activations import swiglu
    from fla.modules.l2norm import l2_norm

    yield "rmsnorm", RMSNorm(D).to("cuda", BF), [randn(N, D)], 2, 3
    yield "rmsnorm_gated_d128", FusedRMSNormGated(128).to("cuda", BF), [randn(N * 32, 128), randn(N * 32, 128)], 3, 5
    yield "l2norm_d128", l2_norm, [randn(N * 32, 128)], 2, 3
    yield "swiglu", swiglu, [randn(N, D), randn(N, D)], 3, 5
    yield "rotary", RotaryEmbedding(128).to("cuda"), [randn(4, N // 4, 32, 128), randn(4, N // 4, 32, 128)], 4, 4


def whole(library: str, only: list[str]) -> None:
    mib = 2 * N * D
    for name, fn, inputs, forward, backward in cases(library):
        if only and name not in only:
            continue
        try:
            t = time.perf_counter()
            out = fn(*inputs)
            out = out if isinstance(out, tuple) else (out,)
            grads = [torch.randn_like(o.detach()) for o in out]

            def both(fn: Any = fn, inputs: Any = inputs, grads: Any = grads) -> None:
                for x in inputs:
                    x.grad = None
                out = fn(*inputs)
                torch.autograd.backward(out if isinstance(out, tuple) else (out,), grads)

            both()
            torch.cuda.synchronize()
            first = time.perf_counter() - t
            with torch.no_grad():
                f, hf = median_ms(lambda fn=fn, inputs=inputs: fn(*inputs)), host_us(lambda fn=fn, i=inputs: fn(*i))
            b, hb = median_ms(both), host_us(both)
            floors = forward * mib / BANDWIDTH, (forward + backward) * mib / BANDWIDTH
            print(
                f"{library:6s} {name:18s} fwd {f:.3f} (floor {floors[0]:.3f}, host {hf:.0f} us)  "
                f"fwd+bwd {b:.3f} (floor {floors[1]:.3f}, host {hb:.0f} us)  first {first:.1f} s",
                flush=True,
            )
        except Exception as e:
            print(f"{library:6s} {name:18s} {type(e).__name__}: {str(e)[:150]}", flush=True)


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
    what = sys.argv[1:] or ["ours"]
    modes = ("ours", "variants", "first", "compile", "peer", "liger", "torch")
    only = [w for w in what if w not in modes and not w.isdigit()]
    if "peer" not in what and "liger" not in what:
        sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    print(torch.cuda.get_device_name(0), torch.__version__)
    if "compile" in what:
        mine, step = int(what[1]), int(what[2])
        for i, (_, fn) in enumerate(variants()):
            if i % step == mine:
                fn()
        torch.cuda.synchronize()
        return
    if "ours" in what:
        from check_rows import check

        for name in ("rms many 4096", "gated many 128", "l2 many 128", "swiglu even", "rotary many"):
            if wrong := check(name)[1]:
                sys.exit(f"no timing: {name} {wrong}")
        whole("ours", only)
    if "first" in what:
        for name, fn, inputs, _, _ in cases("ours"):
            t = time.perf_counter()
            out = fn(*inputs)
            torch.cuda.synchronize()
            middle = time.perf_counter()
            out = out if isinstance(out, tuple) else (out,)
            torch.autograd.backward(out, [torch.ones_like(o) for o in out])
            torch.cuda.synchronize()
            print(f"first {name} {middle - t:.2f} + {time.perf_counter() - middle:.2f} s", flush=True)
    if "variants" in what:
        for name, fn in variants():
            print(f"{name} {median_ms(fn, 20):.4f}", flush=True)
    for library in ("peer", "liger", "torch"):
        if library in what:
            whole(library, only)


if __name__ == "__main__":
    main()
