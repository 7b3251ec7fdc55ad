# SPDX-License-Identifier: MIT
"""Check and time the short convolution on a GPU.

`conv.py check [PART OF PARTS]`: every case against float64, forward and all gradients, four times over, bit for bit.
`conv.py time`: whole calls of `fla.modules` (of whichever `fla` is on the path) beside the traffic floor.
`conv.py variants`: the kernels by launch. first.py times first calls.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BF, HF, F32 = torch.bfloat16, torch.float16, torch.float32
BANDWIDTH = 4.3e9  # bytes a millisecond, device copy of an H200

# name -> B, T, D, W, dtype, and what differs: cu, state, final, bias, res, silu, strided, wdtype, off
CASES: dict[str, tuple[int, int, int, int, torch.dtype, dict[str, Any]]] = {
    "plain": (2, 300, 512, 4, BF, {}),
    "large": (2, 1500, 2048, 4, BF, {}),
    "long": (1, 40000, 512, 4, BF, {"bias": True}),
    "everything": (2, 200, 768, 4, BF, {"state": True, "final": True, "bias": True, "res": True}),
    "no activation": (2, 130, 256, 4, BF, {"silu": False, "bias": True, "state": True, "final": True}),
    "W3 fp16": (2, 65, 100, 3, HF, {"state": True, "final": True, "bias": True}),
    "W2": (1, 257, 200, 2, BF, {"state": True, "final": True, "res": True}),
    "W1": (2, 50, 128, 1, BF, {"state": True, "final": True}),
    "D100": (3, 77, 100, 4, BF, {"bias": True}),
    "D33": (3, 77, 33, 4, BF, {"bias": True, "state": True}),
    "T1": (4, 1, 256, 4, BF, {"state": True, "final": True}),
    "T3": (4, 3, 256, 4, BF, {"state": True, "final": True}),
    "varlen": (1, 700, 512, 4, BF, {"cu": [0, 0, 3, 64, 65, 400, 700, 700], "state": True, "final": True}),
    "varlen 2": (1, 9000, 256, 4, BF, {"cu": [0, 1, 5000, 9000]}),
    "varlen many": (1, 640, 64, 3, BF, {"cu": list(range(0, 641, 5)), "state": True, "final": True}),
    "strided": (2, 300, 512, 4, BF, {"strided": True, "res": True}),
    "offset by one": (2, 300, 511, 4, BF, {"off": True, "bias": True}),
    "weight fp32": (2, 300, 512, 4, BF, {"wdtype": F32, "bias": True}),
    "fp32": (2, 300, 512, 4, F32, {"bias": True, "state": True, "final": True, "res": True}),
    "fp32 varlen": (1, 300, 96, 4, F32, {"cu": [0, 100, 101, 300], "bias": True, "state": True}),
}  # fmt: skip


def reference(x: Tensor, weight: Tensor, bias: Any, residual: Any, state: Any, silu: bool, cu: Any) -> tuple[Any, Any]:
    """In float64, one sequence at a time; state `[N, D, W]`."""
    W = weight.shape[1]
    bounds = (
        [(b, 0, x.shape[1]) for b in range(x.shape[0])] if cu is None else [(0, *c) for c in itertools.pairwise(cu)]
    )
    rows, finals = [], []
    for n, (b, begin, end) in enumerate(bounds):
        past = x.new_zeros(x.shape[2], W) if state is None else state[n]
        u = torch.cat([past, x[b, begin:end].t()], 1)
        p = F.conv1d(u[None, :, 1:], weight[:, None], bias, groups=x.shape[2])[0].t() if end > begin else x[b, :0]
        rows.append(F.silu(p) if silu else p)
        finals.append(u[:, u.shape[1] - W :])
    y = torch.cat(rows).view(x.shape)
    return (y if residual is None else y + residual), torch.stack(finals)


def ratio(ref: Tensor, got: Tensor) -> float:
    ref, got = ref.double(), got.double()
    ref, got = ref.detach(), got.detach()
    return float((ref - got).square().mean().sqrt() / (ref.square().mean().sqrt() + 1e-8)) if ref.numel() else 0.0


def check(name: str) -> list[str]:
    from fla.backends import last_decision
    from fla.modules.causal_conv1d import causal_conv1d

    B, T, D, W, dtype, o = CASES[name]
    torch.manual_seed(0)
    cu, silu = o.get("cu"), o.get("silu", True)
    N = B if cu is None else len(cu) - 1

    def make(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device="cuda").to(dtype)

    a: dict[str, Tensor] = {"x": make(B, T, D), "weight": make(D, W, dtype=o.get("wdtype", dtype))}
    if o.get("strided"):
        a["x"] = make(B, T, 3 * D)[..., D : 2 * D]
    if o.get("off"):
        a["x"] = make(B, T, D + 1)[..., 1:]
    if o.get("bias"):
        a["bias"] = make(D, dtype=o.get("wdtype", dtype))
    if o.get("res"):
        a["residual"] = make(B, T, D)
    if o.get("state"):
        a["initial_state"] = make(N, D, W)
    dy, ds = make(B, T, D), make(N, D, W)
    final = bool(o.get("final"))
    offsets = None if cu is None else torch.tensor(cu, device="cuda")
    first: dict[str, Tensor] | None = None
    bad = []
    for _ in range(4):
        y, s = causal_conv1d(
            **(leaves := _leaves(a)),
            output_final_state=final, activation="silu" if silu else None, cu_seqlens=offsets,
        )  # fmt: skip
        if "triton" not in str(last_decision()):
            bad.append(f"ran on {last_decision()}")
        loss = [(y, dy), (s, ds)] if final else [(y, dy)]
        grads = torch.autograd.grad([t for t, _ in loss], list(leaves.values()), [g for _, g in loss])
        got = {"y": y.detach(), **({"final": s.detach()} if final else {}), **dict(zip(leaves, grads, strict=True))}
        if first is None:
            first = got
        else:
            bad += [f"{n} differs between runs" for n in got if not torch.equal(got[n], first[n])]
    assert first is not None
    b = {n: t.detach().double().requires_grad_() for n, t in a.items()}
    y, s = reference(
        b["x"], b["weight"], b.get("bias"), b.get("residual"), b.get("initial_state"), silu, cu
    )  # fmt: skip
    loss = [(y, dy.double()), (s, ds.double())] if final else [(y, dy.double())]
    grads = torch.autograd.grad([t for t, _ in loss], list(b.values()), [g for _, g in loss])
    want = {"y": y, **({"final": s} if final else {}), **dict(zip(b, grads, strict=True))}
    for n, ref in want.items():
        limit = 1e-5 if dtype == F32 else 5e-3 if n in ("y", "final") else 1e-2
        error = ratio(ref, first[n])
        if not error < limit:
            bad.append(f"{n} {error:.1e}")
    return bad


def _leaves(a: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.detach().requires_grad_() for n, t in a.items()}


def check_update() -> list[str]:
    from fla.modules.causal_conv1d import causal_conv1d_update

    bad = []
    for (N, D, W), dtype, silu in itertools.product([(64, 4096, 4), (3, 100, 3), (1, 33, 1)], (BF, F32), (True, False)):
        torch.manual_seed(0)
        x, cache = (torch.randn(s, device="cuda").to(dtype) for s in ((N, D), (N, D, W)))
        w, b, r = (torch.randn(s, device="cuda").to(dtype) for s in ((D, W), (D,), (N, D)))
        want, state = reference(
            x[:, None].double(), w.double(), b.double(), r[:, None].double(), cache.double(), silu, None
        )
        y, same = causal_conv1d_update(x, cache, r, w, b, "silu" if silu else None)
        limit = 1e-5 if dtype == F32 else 5e-3
        if same is not cache or ratio(state, cache) > 0 or not ratio(want[:, 0], y) < limit:
            bad.append(f"update {N, D, W} {dtype} {silu}: {ratio(want[:, 0], y):.1e} {ratio(state, cache):.1e}")
    return bad


def check_large() -> list[str]:
    """More than 2**31 elements: the end of a long sequence against the same rows by themselves."""
    from fla.modules.causal_conv1d import causal_conv1d

    T, D, n = 140_000, 16_384, 128
    x = torch.randn(1, T, D, device="cuda", dtype=BF)
    w = torch.randn(D, 4, device="cuda", dtype=BF)
    dy = torch.randn(1, T, D, device="cuda", dtype=BF)
    tail = x[:, -n:].clone()
    y = causal_conv1d(x.requires_grad_(), w, activation="silu")[0]
    (dx,) = torch.autograd.grad(y, x, dy)
    z = causal_conv1d(tail.requires_grad_(), w, activation="silu")[0]
    (dz,) = torch.autograd.grad(z, tail, dy[:, -n:])
    same = {"y": torch.equal(y[:, 3 - n :], z[:, 3:]), "dx": torch.equal(dx[:, 3 - n :], dz[:, 3:])}
    return [f"large {name} differs" for name, equal in same.items() if not equal]


def check_all(part: int = 0, parts: int = 1) -> bool:
    green = True
    for name in list(CASES)[part::parts]:
        t = time.time()
        try:
            bad = check(name)
        except Exception as e:
            bad = [repr(e)[:300]]
        green = green and not bad
        print(f"{'WRONG' if bad else 'ok'} {name} {time.time() - t:.1f}s {bad or ''}", flush=True)
    if part == 0:
        bad = check_update() + check_large()
        green = green and not bad
        print(f"{'WRONG' if bad else 'ok'} update and large {bad or ''}", flush=True)
    return green


def median_ms(fn: Any, n: int = 25, hide: int = 0) -> float:
    flush = torch.empty(128 << 20, dtype=torch.int8, device="cuda")
    for _ in range(min(3, n // 3)):
        fn()
    events = []
    for _ in range(n):
        flush.zero_()
        if hide:
            torch.cuda._sleep(hide)
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        fn()
        b.record()
        events.append((a, b))
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in events)[n // 2]


def whole() -> None:
    """Calls as users make them; the case of the modules table first."""
    from fla.modules import ShortConvolution

    x = torch.randn(4, 2048, 4096, device="cuda").to(BF).requires_grad_()
    dy = torch.randn_like(x)
    norm = torch.nn.RMSNorm(4096, device="cuda", dtype=BF)
    for name, fn in (("silu", F.silu), ("RMSNorm", norm)):
        t = median_ms(lambda fn=fn: fn(x).backward(dy))
        print(f"torch's {name}, fwd+bwd for comparison: {t:.4f}", flush=True)
    for B, T, D in ((4, 2048, 4096), (1, 8192, 2048), (1, 32768, 4096)):
        t = time.time()
        conv = ShortConvolution(D, 4, activation="silu").to("cuda", BF)
        x = torch.randn(B, T, D, device="cuda").to(BF).requires_grad_()
        dy = torch.randn_like(x)

        def fwd(conv: Any = conv, x: Tensor = x) -> Tensor:
            return conv(x)[0]

        def both(fwd: Any = fwd, dy: Tensor = dy, x: Tensor = x) -> None:
            x.grad = None
            fwd().backward(dy)

        both()
        torch.cuda.synchronize()
        cold = time.time() - t
        with torch.no_grad():
            row = [f"fwd {median_ms(fwd):.4f} (kernels {median_ms(fwd, hide=400_000):.4f})"]
        row.append(f"fwd+bwd {median_ms(both):.4f} (kernels {median_ms(both, hide=1_000_000):.4f})")
        n = 2 * B * T * D / BANDWIDTH  # one pass over a tensor of that size
        print(
            f"conv {B}x{T}x{D}: {'  '.join(row)}  floors {2 * n:.4f} {5 * n:.4f}  first call {cold:.2f} s", flush=True
        )


def variants() -> None:
    from fla.modules.causal_conv1d import launch

    B, T, D = 4, 2048, 4096
    x = torch.randn(B, T, D, device="cuda").to(BF)
    dy, w = torch.randn_like(x), torch.randn(D, 4, device="cuda").to(BF)
    base = launch.Call.make(x, 4, None)
    for block, warps in ((512, 4), (512, 2), (1024, 4), (256, 1), (256, 2)):
        for ahead in (False, True):
            for rows in (16, 32, 64, 128, 256):
                plan = dataclasses.replace(base.plan, rows=rows, ahead=ahead, block=block, warps=warps)
                call = launch.Call.make(x, 4, None, plan)
                fwd = functools.partial(launch.conv_fwd, call, x, w, None, None, None, True)
                bwd = functools.partial(launch.conv_bwd, call, x, w, None, None, dy, None, True, True, True)
                times = (
                    median_ms(fwd, 9, 200_000) if rows < 256 else 0.0,
                    median_ms(bwd, 9, 200_000) if rows > 16 else 0.0,
                )
                print(
                    f"block {block} warps {warps} ahead {ahead:d} rows {rows}: fwd {times[0]:.4f} bwd {times[1]:.4f}",
                    flush=True,
                )


def main() -> None:
    what = sys.argv[1:] or ["check", "time"]
    if what[0] == "check":
        part, parts = (int(v) for v in what[1:3]) if len(what) > 2 else (0, 1)
        if not check_all(part, parts):
            sys.exit("a check failed")
        what = [w for w in what[1:] if not w.isdigit()]
    if "time" in what:
        whole()
    if "variants" in what:
        variants()


if __name__ == "__main__":
    main()
