# SPDX-License-Identifier: MIT

"""The eight modules of the speed table beside fla-core and Liger-Kernel on one GPU, in one run.

`table.py [--peer DIR] [--liger DIR] [CASE ...]` prints the table; DIR is where that package is installed, apart from
this one (`pip install --target DIR --no-deps ...`). Each library runs in a process of its own, on the same inputs.
`table.py --compile ...` runs every case once, one process each, so that the compilers' caches are full afterwards.

Times are medians of CUDA events around whole calls, autograd included, the L2 cache flushed between calls: forward
under `no_grad`, and forward with backward from all outputs. "kernels" has launches hidden behind a waiting kernel.
Parameters keep their gradients between calls, inputs do not. Every case is first compared with PyTorch in float32 or
float64.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent))

from children import Child

N, D, T, V = 8192, 4096, 16384, 131072
BANDWIDTH, FLOPS = 4.3e9, 788e9  # of an H200, a millisecond
_TENSOR, _PRODUCT = 2 * N * D / BANDWIDTH, 2 * T * D * V / FLOPS
# Floors, then goals of the project; forward, and forward with backward.
CASES: dict[str, tuple[float, float, float, float]] = {
    "rmsnorm": (2 * _TENSOR, 5 * _TENSOR, 0.040, 0.20),
    "gated rmsnorm, D 128": (3 * _TENSOR, 8 * _TENSOR, 0.060, 0.30),
    "l2norm, D 128": (2 * _TENSOR, 5 * _TENSOR, 0.040, 0.15),
    "swiglu": (3 * _TENSOR, 8 * _TENSOR, 0.058, 0.20),
    "short conv, 4 taps, silu": (2 * _TENSOR, 5 * _TENSOR, 0.045, 0.25),
    "rotary, q and k": (4 * _TENSOR, 8 * _TENSOR, 0.080, 0.26),
    "cross entropy, 8k x 128k": (2 * N * V / BANDWIDTH, 6 * N * V / BANDWIDTH, 0.60, 1.6),
    "linear cross entropy, 16k x 4096 x 128k": (_PRODUCT, 3 * _PRODUCT, 78.0, 80.0),
}
NAMES = list(CASES)
LIBRARIES = {"ours": "ours", "peer": "fla-core", "liger": "Liger"}
LIGER = (0, 3, 6, 7)


def one(name: str, library: str) -> tuple[Callable[..., Any], list[Any], list[Any], Callable[..., Any]]:
    """The call, its arguments, its parameters, and a reference: ``(outputs, gradients)`` for gradients of outputs."""
    import reference
    import torch

    torch.manual_seed(0)
    BF, i = torch.bfloat16, NAMES.index(name)

    def randn(*shape: int) -> Any:
        return torch.randn(shape, device="cuda").to(BF).requires_grad_()

    if i >= 6:
        target = torch.randint(0, V, (T,), device="cuda")
    if library == "liger":
        from liger_kernel.ops import LigerSiLUMulFunction
        from liger_kernel.transformers import LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss, LigerRMSNorm

        linear = LigerFusedLinearCrossEntropyLoss()
        made = {
            0: lambda: LigerRMSNorm(D),
            3: lambda: LigerSiLUMulFunction.apply,
            6: LigerCrossEntropyLoss,
            7: lambda: lambda x, target, w: linear(w, x, target),
        }[i]()
    else:
        from fla import modules as m
        from fla.modules.activations import swiglu
        from fla.modules.l2norm import l2_norm

        made = [
            lambda: m.RMSNorm(D), lambda: m.FusedRMSNormGated(128), lambda: l2_norm, lambda: swiglu,
            lambda: m.ShortConvolution(D, 4, activation="silu"), lambda: m.RotaryEmbedding(128),
            m.FusedCrossEntropyLoss, m.FusedLinearCrossEntropyLoss,
        ][i]()  # fmt: skip
    parameters: list[Any] = []
    if isinstance(made, torch.nn.Module):
        made = made.to("cuda", BF) if i != 5 else made.to("cuda")
        parameters = list(made.parameters())
        with torch.no_grad():
            for p in parameters:
                p.copy_(torch.randn_like(p, dtype=torch.float32) / (2 if i == 4 else 1))
    inputs = [
        lambda: [randn(N, D)],
        lambda: [randn(N * 32, 128), randn(N * 32, 128)],
        lambda: [randn(N * 32, 128)],
        lambda: [randn(N, D), randn(N, D)],
        lambda: [randn(4, N // 4, D)],
        lambda: [randn(4, N // 4, 32, 128), randn(4, N // 4, 32, 128)],
        lambda: [randn(N, V), target[:N]],
        lambda: [randn(T, D), target, randn(V, D)],
    ][i]()
    return made, inputs, parameters, reference.REFERENCES[i]


def outputs_of(made: Callable[..., Any], inputs: list[Any]) -> list[Any]:
    out = made(*inputs)
    return [o for o in (out if isinstance(out, tuple) else (out,)) if o is not None]


def median(fn: Callable[[], Any], most: int, hide: int = 0) -> float:
    """Median over as many calls as fit into 0.3 s, at most ``most``; ``hide``: cycles that the device waits before."""
    import torch

    def event() -> Any:
        return torch.cuda.Event(enable_timing=True)

    for _ in range(3 if most > 5 else 1):
        fn()
    torch.cuda.synchronize()
    t0 = time.perf_counter()
    fn()
    torch.cuda.synchronize()
    n = int(min(max(0.3 / (time.perf_counter() - t0), 3), most))
    flush = torch.empty(128 << 20, dtype=torch.int8, device="cuda")
    pairs = []
    for _ in range(n):
        flush.zero_()
        if hide:
            torch.cuda._sleep(hide)
        a, b = event(), event()
        a.record()
        fn()
        b.record()
        pairs.append((a, b))
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in pairs)[n // 2]


def host_us(fn: Callable[[], Any]) -> float:
    import torch

    best = 1e9
    for _ in range(5):
        torch.cuda.synchronize()
        t = time.perf_counter()
        for _ in range(10):
            fn()
        best = min(best, (time.perf_counter() - t) * 1e5)
    torch.cuda.synchronize()
    return best


def measure(name: str, library: str, compile_only: bool) -> dict[str, Any]:
    """Check a case, and time it unless it is wrong."""
    import torch

    made, inputs, parameters, reference = one(name, library)
    leaves = [x for x in inputs if x.requires_grad]
    # Liger-Kernel writes gradients over inputs and over the gradients that come in.
    kept = [x.detach().clone() for x in inputs]
    torch.cuda.synchronize()
    t = time.perf_counter()
    outputs = outputs_of(made, inputs)
    grads = [torch.ones_like(o) if o.dim() == 0 else torch.randn_like(o) for o in outputs]
    kept_grads = [g.clone() for g in grads]
    torch.autograd.backward(outputs, grads)
    torch.cuda.synchronize()
    found: dict[str, Any] = {"case": name, "library": library, "first": round(time.perf_counter() - t, 2)}

    def forward() -> Any:
        with torch.no_grad():
            return made(*inputs)

    if compile_only:
        forward()
        torch.cuda.synchronize()
        return found
    got = [[o.detach() for o in outputs], [x.grad for x in leaves + parameters]]
    errors = reference(kept, parameters, kept_grads, got)
    found["errors"] = [float(f"{e:.1e}") for e in errors]
    limits = (5e-3, 1e-2) if library == "ours" else (3e-2, 3e-2)
    found["right"] = all(e < limits[k >= len(outputs)] for k, e in enumerate(errors))
    del got, outputs, kept
    if not found["right"]:
        return found

    def both() -> None:
        for x in leaves:
            x.grad = None
        torch.autograd.backward(outputs_of(made, inputs), grads)

    slow = "cross entropy" in name
    most = 3 if name == NAMES[7] else 60
    for key, run in (("fwd", forward), ("both", both)):
        for x in leaves:
            x.grad = None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found[key] = median(run, most)
        found[f"{key}_gb"] = round((torch.cuda.max_memory_allocated() - before - (128 << 20)) / 1e9, 2)
        if not slow:
            found[f"{key}_kernels"] = median(run, 20, 1_500_000)
            found[f"{key}_host"] = host_us(run)
    return found


def nothing() -> dict[str, Any]:
    """What an autograd function in Python costs that does nothing, with one input and one parameter."""
    import torch

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, w: Any) -> Any:
            ctx.save_for_backward(x, w)
            return torch.empty_like(x)

        @staticmethod
        def backward(ctx: Any, dy: Any) -> tuple[Any, Any]:
            x, w = ctx.saved_tensors
            return torch.empty_like(x), torch.empty_like(w)

    x, w = (torch.zeros(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in ((N, D), (D,)))
    dy = torch.zeros_like(x)

    def both() -> None:
        x.grad = None
        torch.autograd.backward([Nothing.apply(x, w)], [dy])

    return {"case": "nothing", "library": "ours", "both": median(both, 60), "both_host": host_us(both)}


def child(library: str, names: list[str], compile_only: bool) -> None:
    import torch
    import triton

    if library == "peer":
        import fla

        root = Path(__file__).resolve().parents[2]
        if root in Path(str(fla.__file__)).resolve().parents:
            sys.exit(f"{fla.__file__} is this package, not fla-core: give the folder it is installed in as --peer")
    if library != "ours":
        # Their kernels are tuned here, on the card as it is now, in shorter trials than Triton's.
        trial = {"warmup": 1, "rep": 1} if compile_only else {"warmup": 5, "rep": 20}
        triton.testing.do_bench = functools.partial(triton.testing.do_bench, **trial)
    torch.backends.cuda.matmul.allow_tf32 = False
    # torch's own first times.
    one = torch.ones(64, 64, device="cuda", requires_grad=True)
    torch.autograd.backward([one @ one], [torch.ones_like(one)])
    torch.cuda.synchronize()
    print("READY", flush=True)
    sys.stdin.readline()
    for name in names:
        try:
            found = measure(name, library, compile_only)
        except Exception as e:
            found = {"case": name, "library": library, "wrong": f"{type(e).__name__}: {str(e)[:150]}"}
        print("FOUND " + json.dumps(found), flush=True)
        torch.cuda.empty_cache()
    if library == "ours" and not compile_only:
        print("FOUND " + json.dumps(nothing()), flush=True)


def pair(found: dict[str, Any] | None, suffix: str = "") -> str:
    if found is None:
        return "-"
    if found.get("wrong"):
        return str(found["wrong"])[:60]
    if not found["right"]:
        return f"WRONG {found['errors']}"
    a, b = (found.get(key + suffix) for key in ("fwd", "both"))
    if a is None or b is None:
        return "-"
    if suffix == "_host":
        return f"{a:.0f} / {b:.0f}"
    return f"{a:.3f} / {b:.3f}" if a < 10 else f"{a:.1f} / {b:.1f}"


def show(results: list[dict[str, Any]]) -> None:
    idle = [r for r in results if r["case"] == "nothing"]
    results = [r for r in results if r["case"] != "nothing"]
    at = {(r["case"], r["library"]): r for r in results}
    print(
        "| ms, forward / with backward | floor | goal | ours | fla-core | Liger | ours over best peer | ours, kernels "
        "| ours, host us | errors ours |\n|" + "---|" * 10
    )
    for name, (f, b, gf, gb) in CASES.items():
        ours, *peers = (at.get((name, library)) for library in LIBRARIES)
        if ours is None and not any(peers):
            continue
        ratio = "-"
        good = [p for p in peers if p is not None and p.get("right")]
        if ours is not None and ours.get("right") and good:
            ratios = [ours[key] / min(p[key] for p in good) for key in ("fwd", "both")]
            ratio = " / ".join(f"{r:.2f}{' SLOWER' if r > 1.05 else ''}" for r in ratios)
        met = ""
        if ours is not None and ours.get("right"):
            missed = [w for w, key, goal in (("fwd", "fwd", gf), ("both", "both", gb)) if ours[key] > goal]
            met = f" (goal missed: {', '.join(missed)})" if missed else ""
        errors = "" if ours is None else " ".join(f"{e:.0e}" for e in ours.get("errors", []))
        floors = f"{f:.3f} / {b:.3f}" if b < 10 else f"{f:.1f} / {b:.1f}"
        cells = [name, floors, f"{gf:g} / {gb:g}", pair(ours) + met, *map(pair, peers), ratio]
        print("| " + " | ".join([*cells, pair(ours, "_kernels"), pair(ours, "_host"), errors]) + " |")
    for r in results:
        extra = [f"first call {r['first']} s"] if "first" in r else []
        if r["case"] == NAMES[7] and "both_gb" in r:
            extra.append(f"peak {r['fwd_gb']} / {r['both_gb']} GB above the inputs")
        if r["library"] != "ours" and "wrong" not in r:
            extra += [f"errors {r.get('errors')}", f"kernels {pair(r, '_kernels')}", f"host {pair(r, '_host')} us"]
        print(f"{LIBRARIES[r['library']]}, {r['case']}: {', '.join(extra) or r.get('wrong')}")
    for r in idle:
        print(
            f"an autograd function that does nothing, with backward: {r['both']:.3f} ms, host {r['both_host']:.0f} us"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="where fla-core is installed")
    parser.add_argument("--liger", help="where Liger-Kernel is installed")
    parser.add_argument("--compile", action="store_true", help="run everything once, print nothing but first calls")
    parser.add_argument("--peer-cache", default="", help="TRITON_CACHE_DIR of the other libraries")
    parser.add_argument("--seconds", type=float, default=600, help="stop after so long, with what there is")
    parser.add_argument("--json", help="file for all figures")
    parser.add_argument("--no-ours", action="store_true")
    parser.add_argument("--child", choices=LIBRARIES, help=argparse.SUPPRESS)
    parser.add_argument("cases", nargs="*", help=f"beginnings of {', '.join(NAMES)}")
    a = parser.parse_args()
    names = [n for n in NAMES if not a.cases or n.startswith(tuple(a.cases))]
    if a.child:
        child(a.child, names, a.compile)
        return
    folders = {k: v for k, v in (("ours", None), ("liger", a.liger), ("peer", a.peer)) if k == "ours" or v}
    if a.no_ours:
        del folders["ours"]
    has = {k: [n for n in names if k != "liger" or NAMES.index(n) in LIGER] for k in folders}
    began = time.perf_counter()
    deadline = began + a.seconds
    one_each = [(k, [n]) for k in folders for n in has[k]] if a.compile else list(has.items())
    children = [Child(k, folders[k], part, a.compile, a.peer_cache) for k, part in one_each]
    results: list[dict[str, Any]] = []
    if a.compile:
        for c in children:
            c.go()
        for c in children:
            results += c.finish(deadline)
        for r in results:
            print(f"{LIBRARIES[r['library']]}, {r['case']}: {r.get('wrong') or r['first']}")
        return
    # All have imported what they need before the first begins: then the machine is each one's alone.
    for c in children:
        c.ready.wait(max(0.0, deadline - time.perf_counter()))
    print(f"ready after {time.perf_counter() - began:.0f} s", flush=True)
    for c in children:
        t = time.perf_counter()
        c.go()
        results += c.finish(deadline)
        print(f"{LIBRARIES[c.library]} took {time.perf_counter() - t:.0f} s", flush=True)
    show(results)
    print(f"{time.perf_counter() - began:.0f} s in all")
    if a.json:
        Path(a.json).write_text(json.dumps(results))
    wrong = [r["case"] for r in results if r["library"] == "ours" and r["case"] in CASES and not r.get("right")]
    if wrong:
        sys.exit(f"ours is wrong: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
