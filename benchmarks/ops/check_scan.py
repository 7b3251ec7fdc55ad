# SPDX-License-Identifier: MIT
# ruff: noqa: E402  (the path comes first)
"""Check and time the elementwise scan (HGRN) on a GPU.

`check_scan.py check [I N]` compares every (N-th) case with the PyTorch path in float64, forward and backward, twice;
`check_scan.py variants` times launches, `time` whole calls.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parents[1] / "modules"), str(Path(__file__).parents[2])]

from check_rows import ratio
from time_rows import host_us, median_ms

from fla.ops._common.policy import Launch
from fla.ops._scan import autograd
from fla.ops._scan.policy import ScanPlan
from fla.ops.hgrn.shared import hgrn

BF, HF, F32 = torch.bfloat16, torch.float16, torch.float32

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "state": {"initial": True},
    "T1": {"T": 1, "initial": True},
    "T8": {"T": 8, "B": 64},
    "T9 odd": {"T": 9, "D": 77},
    "wide": {"B": 1, "T": 1000, "D": 12288, "initial": True},
    "varlen": {"B": 1, "cu": [0, 0, 5, 5, 6, 400, 1000, 1000], "T": 1000, "initial": True},
    "varlen no state": {"B": 1, "cu": [0, 0, 5, 5, 6, 400, 1000, 1000], "T": 1000},
    "varlen wide": {"B": 1, "cu": [0, 64, 5000], "T": 5000, "D": 8192},
    "few": {"B": 1, "T": 5000, "D": 512, "initial": True},
    "few odd": {"B": 2, "T": 4097, "D": 100, "initial": True},
    "few varlen": {"B": 1, "T": 5000, "D": 256, "initial": True, "cu": [0, 1, 1, 2000, 4096, 5000]},
    "-inf": {"low": -float("inf"), "initial": True},
    "-1000": {"low": -1000.0},
    "-60": {"low": -60.0},
    "slow": {"scale": 0.01},
    "fp16": {"dtype": HF},
    "fp32": {"dtype": F32, "initial": True},
    "fp32 few": {"dtype": F32, "B": 1, "T": 5000, "D": 64},
}


def check(name: str) -> tuple[list[float], str]:
    s = {"B": 2, "T": 333, "D": 256, "dtype": BF, "initial": False, "scale": 1.0, **CASES[name]}
    torch.manual_seed(0)
    cu = None if s.get("cu") is None else torch.tensor(s["cu"], device="cuda")
    N = s["B"] if cu is None else len(cu) - 1
    x = torch.randn(s["B"], s["T"], s["D"], device="cuda").to(s["dtype"])
    g = torch.nn.functional.logsigmoid(torch.randn_like(x.float())).mul_(s["scale"])
    if s.get("low") is not None:
        g[:, ::5] = s["low"]
    g = g.to(s["dtype"])
    h0 = torch.randn(N, s["D"], device="cuda") if s["initial"] else None
    do, dht = torch.randn_like(x), torch.randn(N, s["D"], device="cuda")

    def run(fn: Any, kind: torch.dtype | None) -> list[torch.Tensor]:
        leaves = [(t.to(kind) if kind else t.clone()).requires_grad_() for t in (x, g, h0) if t is not None]
        o, ht = fn(*leaves[:2], leaves[2] if h0 is not None else None, True, cu)
        return [o, ht, *torch.autograd.grad([o, ht], leaves, [do.to(o.dtype), dht.to(ht.dtype)])]

    got, again, want = run(autograd.scan, None), run(autograd.scan, None), run(hgrn, torch.float64)
    wrong = "" if all(torch.equal(a, b) for a, b in zip(got, again, strict=True)) else "unsteady "
    errors = [ratio(a, b) for a, b in zip(got, want, strict=True)]
    for i, e in enumerate(errors):
        if not e < (1e-4 if s["dtype"] == F32 else 5e-3 if i < 2 else 1e-2) and want[i].abs().max() > 1e-6:
            wrong += f"[{i}] {e:.1e} "
    return errors, wrong


# Tokens a thread, runs, channels, warps, stages.
VARIANTS = [
    (16, 2, 32, 1, 3), (16, 2, 32, 1, 4), (16, 2, 32, 1, 2), (16, 4, 32, 2, 3), (16, 4, 16, 1, 3), (8, 4, 16, 1, 4),
    (8, 2, 32, 1, 4), (32, 2, 32, 1, 2), (16, 1, 64, 1, 4), (8, 4, 32, 2, 4),
]  # fmt: skip


def variants(mine: int = 0, step: int = 1, compile_only: bool = False) -> None:
    x = torch.randn(1, 8192, 12288, device="cuda").to(BF)
    g = torch.nn.functional.logsigmoid(torch.randn_like(x)).to(BF)
    o, _ = autograd.scan_forward(x, g, None, None, False)
    for bt, runs, bd, warps, stages in VARIANTS[mine::step]:
        plan = ScanPlan(bt, runs, bd, Launch(warps, stages), Launch(warps, stages))
        fns = (
            lambda p=plan: autograd.scan_forward(x, g, None, None, False, p),
            lambda p=plan: autograd.scan_backward(x, g, o, None, None, None, False, p),
        )
        try:
            row = [fn() for fn in fns] and [] if compile_only else [f"{median_ms(fn, 9):.3f}" for fn in fns]
        except Exception as e:
            row = [repr(e)[:80]]
        print(bt, runs, bd, "warps", warps, "stages", stages, *row, flush=True)


def whole() -> None:
    from fla.ops.hgrn import chunk_hgrn, fused_recurrent_hgrn

    for B, T, D in ((1, 8192, 12288), (4, 2048, 2048), (1, 8192, 2048), (1, 32768, 2048)):
        x = torch.randn(B, T, D, device="cuda").to(BF).requires_grad_()
        g = torch.nn.functional.logsigmoid(torch.randn_like(x)).detach().requires_grad_()
        do = torch.randn_like(x)
        fwd = lambda x=x, g=g: chunk_hgrn(x, g)[0]
        both = lambda fwd=fwd, x=x, g=g, do=do: torch.autograd.grad(fwd(), [x, g], do)
        t = time.perf_counter()
        both()
        torch.cuda.synchronize()
        first = time.perf_counter() - t
        with torch.no_grad():
            f = median_ms(fwd, 9)
        floor = 3 * x.numel() * 2 / 4.3e9
        print(
            f"hgrn B{B} T{T} D{D}: fwd {f:.3f} (floor {floor:.3f}) fwd+bwd {median_ms(both, 9):.3f} first {first:.2f}s"
        )
    x = torch.randn(64, 1, 4096, device="cuda").to(BF)
    g, h0 = -torch.rand_like(x), torch.randn(64, 4096, device="cuda")
    step = lambda: fused_recurrent_hgrn(x, g, h0, True)
    with torch.no_grad():
        print(f"hgrn decode B64 D4096: {median_ms(step):.4f} host {host_us(step):.0f} us")


def main() -> None:
    what = sys.argv[1:] or ["check", "time"]
    numbers = [int(a) for a in what if a.isdigit()] or [0, 1]
    print(torch.cuda.get_device_name(0), torch.__version__)
    if "compile" in what:
        variants(*numbers, compile_only=True)
    if "check" in what:
        green = True
        for name in list(CASES)[numbers[0] :: numbers[1]]:
            t = time.time()
            try:
                errors, wrong = check(name)
            except Exception as e:
                errors, wrong = [], repr(e)[:300]
            green = green and not wrong
            row = " ".join(f"{e:.1e}" for e in errors)
            print(f"{'BAD' if wrong else 'ok '} {name:16s} {time.time() - t:4.1f}s {row} {wrong}", flush=True)
        if not green:
            sys.exit("a check failed")
    if "variants" in what:
        variants()
    if "time" in what:
        whole()


if __name__ == "__main__":
    main()
