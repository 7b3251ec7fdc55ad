# SPDX-License-Identifier: MIT
# ruff: noqa: E402  (the path comes first)
"""Check and time the losses over classes on a GPU.

`losses.py check [PART PARTS]`: every case against float64, loss and gradients, twice over, bit for bit.
`losses.py variants`: the kernels by launch. `products`: the parts of the linear cross entropy by chunk. `sums`: the
whole with its two kinds of sums. table.py times whole calls beside other libraries, first.py first calls.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parent)]

from conv import BF, F32, HF, median_ms, ratio

FLOPS = 788e9  # a millisecond, bf16 matrix product of an H200

# name -> N, V, dtype, options; "kind" ce (default), linear, kl, grpo
CASES: dict[str, tuple[int, int, torch.dtype, dict[str, Any]]] = {
    "ce 128k": (64, 131072, BF, {}),
    "ce 32000": (300, 32000, BF, {"label_smoothing": 0.1}),
    "ce 100000 cap": (64, 100000, BF, {"logit_softcapping": 30.0, "logit_scale": 0.5}),
    "ce everything": (
        50, 5000, BF,
        {"label_smoothing": 0.1, "logit_scale": 0.7, "lse_square_scale": 1e-3, "logit_softcapping": 20.0},
    ),
    "ce 50257": (33, 50257, BF, {"lse_square_scale": 1e-4}),
    "ce fp16": (33, 32001, HF, {}),
    "ce fp32": (33, 32000, F32, {"label_smoothing": 0.1}),
    "ce 7 classes": (1000, 7, BF, {}),
    "ce 300 classes fp32": (1000, 300, F32, {}),
    "ce -inf": (64, 8192, BF, {"forbidden": 5000}),
    "ce scale -1": (64, 8192, BF, {"logit_scale": -1.0}),
    "ce inplace": (64, 32000, BF, {"inplace_backward": True}),
    "ce strided": (64, 8192, BF, {"strided": True}),
    "linear": (1000, 32000, BF, {"kind": "linear", "H": 1024}),
    "linear sum cap": (
        300, 32000, BF,
        {"kind": "linear", "H": 512, "reduction": "sum", "logit_softcapping": 30.0, "label_smoothing": 0.1},
    ),
    "linear l2warp": (300, 2000, BF, {"kind": "linear", "H": 256, "use_l2warp": True, "l2_penalty_factor": 1.0}),
    "linear 50257": (300, 50257, BF, {"kind": "linear", "H": 256}),
    "linear bf16 sums": (2000, 32000, BF, {"kind": "linear", "H": 512, "accumulate_grad_in_fp32": False}),
    "linear fp32": (300, 5000, F32, {"kind": "linear", "H": 256, "use_l2warp": True, "l2_penalty_factor": 1.0}),
    "linear all ignored": (64, 5000, BF, {"kind": "linear", "H": 256, "ignored": 1.0}),
    "kl": (64, 32000, BF, {"kind": "kl", "H": 512}),
    "kl fp16": (33, 10001, HF, {"kind": "kl", "H": 256}),
    "kl fp32": (32, 32000, F32, {"kind": "kl", "H": 256}),
    "grpo": (130, 32000, BF, {"kind": "grpo"}),
    "grpo 65536": (33, 65536, BF, {"kind": "grpo"}),
}  # fmt: skip


def _reference_ce(z: Tensor, target: Tensor, o: dict[str, Any]) -> Tensor:
    """Loss of every row in float64."""
    z = z * o.get("logit_scale", 1.0)
    if cap := o.get("logit_softcapping"):
        z = cap * torch.tanh(z / cap)
    lse = z.logsumexp(-1)
    e = o.get("label_smoothing", 0.0)
    picked = z.gather(1, target.clamp(min=0)[:, None])[:, 0]
    loss = lse - (1 - e) * picked + o.get("lse_square_scale", 0.0) * lse.square()
    if e:
        loss = loss - e * z.mean(-1)
    return loss.masked_fill(target == -100, 0.0)


def _sides(N: int, V: int, dtype: torch.dtype, o: dict[str, Any]) -> tuple[list[Tensor], Callable, Callable, Any]:
    """Leaves, our function of them, the reference of their float64 copies, and the gradient of the result."""
    kind = o.pop("kind", "ce")
    target = torch.randint(0, V, (N,), device="cuda")
    target[torch.rand(N, device="cuda") < o.pop("ignored", 0.2)] = -100

    def make(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(shape, device="cuda") * std).to(dtype)

    if kind == "ce":
        from fla.modules.fused_cross_entropy import cross_entropy_loss

        logits = make(N, V, std=3.0)
        if n := o.pop("forbidden", 0):
            logits[:, :n] = -float("inf")
            target = torch.where(target < 0, target, target.clamp(min=n))
        if o.pop("strided", False):
            logits = torch.cat([logits, logits], 1)[:, :V]
        # Written over by the backward pass, so the op gets a copy.
        return (
            [logits],
            lambda z: cross_entropy_loss(z.clone(), target, **o)[0],
            lambda z: _reference_ce(z, target, o),
            torch.randn(N, device="cuda"),
        )
    if kind == "linear":
        from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss
        from fla.modules.l2warp import l2_warp

        H = o.pop("H")
        x, w, b = make(N, H), make(V, H, std=H**-0.5), make(V)

        def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            z = F.linear(x, w, b)
            # As the layer's would be: which logit is the largest depends on it.
            z = z + (z.to(dtype).double() - z).detach()
            rows = _reference_ce(z, target, o).sum()
            loss = rows if o.get("reduction") == "sum" else rows / (target != -100).sum().clamp(min=1)
            return l2_warp(loss, z[None], o["l2_penalty_factor"]) if o.get("use_l2warp") else loss

        leaves = [x, w, b]
        return leaves, lambda x, w, b: fused_linear_cross_entropy_loss(x, target, w, b, **o), linear, torch.tensor(3.0)
    if kind == "kl":
        from fla.modules.fused_kl_div import fused_kl_div_loss

        H = o["H"]
        x, w = make(N, H), make(V, H, std=H**-0.5)
        tx, tw = make(N, H), make(V, H, std=H**-0.5)

        def kl(x: Tensor, w: Tensor) -> Tensor:
            s, t = (x @ w.t()).log_softmax(-1), (tx.double() @ tw.double().t()).log_softmax(-1)
            return F.kl_div(s, t, log_target=True, reduction="batchmean")

        return [x, w], lambda x, w: fused_kl_div_loss(x, tx, w, tw), kl, torch.tensor(3.0)
    from fla.modules.grpo import fused_grpo_loss, grpo_loss_torch

    logits, ids = make(2, N + 1, V), torch.randint(0, V, (2, N + 5), device="cuda")
    ref = torch.randn(2, N, device="cuda") - 10
    advantage, keep = torch.randn(2, device="cuda"), torch.rand(2, N, device="cuda") > 0.2
    return (
        [logits],
        lambda z: fused_grpo_loss(z, ref, ids, advantage, completion_mask=keep),
        lambda z: grpo_loss_torch(z, ref, ids, advantage, completion_mask=keep),
        torch.randn(2, N, device="cuda"),
    )


def check(name: str) -> tuple[list[str], list[str]]:
    from fla.backends import trace

    N, V, dtype, o = CASES[name]
    torch.manual_seed(0)
    leaves, ours, reference, dloss = _sides(N, V, dtype, dict(o))
    dloss = dloss.to("cuda")
    seen: list[list[Tensor]] = []
    bad: list[str] = []
    for _ in range(2):
        a = [t.detach().requires_grad_() for t in leaves]
        with trace() as calls:
            loss = ours(*a)
        if not any("triton" in str(c.decision) for c in calls.calls):
            bad.append("not on triton")
        seen.append([loss.detach(), *torch.autograd.grad(loss, a, dloss.to(loss.dtype))])
    bad += [f"{i} differs between runs" for i, (p, q) in enumerate(zip(*seen, strict=True)) if not torch.equal(p, q)]
    b = [t.detach().double().requires_grad_() for t in leaves]
    loss = reference(*b)
    want = [loss.detach(), *torch.autograd.grad(loss, b, dloss.to(loss.dtype))]
    errors = [ratio(r.nan_to_num(), g.nan_to_num()) for r, g in zip(want, seen[0], strict=True)]
    # float32 products are TF32 or not as torch is set; logits of a 16-bit product are rounded as the layer's would be.
    limit = 1e-4 if dtype == F32 else 1e-2
    bad += [f"{i} {e:.1e}" for i, e in enumerate(errors) if not e < (limit if i or dtype == F32 else 5e-3)]
    return bad, [f"{e:.1e}" for e in errors]


def check_all(part: int = 0, parts: int = 1) -> bool:
    green = True
    for name in list(CASES)[part::parts]:
        t = time.time()
        try:
            bad, errors = check(name)
        except Exception as e:
            bad, errors = [repr(e)[:300]], []
        green = green and not bad
        print(f"{'WRONG' if bad else 'ok'} {name} {time.time() - t:.1f}s {' '.join(errors)} {bad or ''}", flush=True)
    return green


def sums() -> None:
    """The linear cross entropy with its weight's gradient summed in float32, and in 16 bits; table.py has the rest."""
    from fla.modules import FusedLinearCrossEntropyLoss

    V, H, T = 131072, 4096, 16384
    target = torch.randint(0, V, (T,), device="cuda")
    leaves = [torch.randn(s, device="cuda").to(BF).requires_grad_() for s in ((T, H), (V, H))]
    for wide in (True, False):
        loss = FusedLinearCrossEntropyLoss(accumulate_grad_in_fp32=wide)

        def both(loss: Any = loss) -> None:
            for t in leaves:
                t.grad = None
            loss(leaves[0], target, leaves[1]).backward()

        both()
        for t in leaves:
            t.grad = None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        both()
        peak = (torch.cuda.max_memory_allocated() - base) / 1e9
        floor = 6 * T * H * V / FLOPS
        print(f"float32 sums {wide}: {median_ms(both, 4):.1f} ms, floor {floor:.1f}, {peak:.2f} GB", flush=True)


def variants() -> None:
    from fla.modules._loss import launch

    N, V, k = 8192, 131072, 1024
    z = torch.randn(N, V, device="cuda", dtype=BF)
    g = torch.empty_like(z)
    target = torch.randint(0, V, (N,), device="cuda")
    o, each = launch.Options(), torch.full((N,), 1e-4, device="cuda")
    lse = launch.cross_entropy(z, target, o, V, 0)[2]

    def loss(p: Any) -> None:
        launch.cross_entropy(z, target, o, V, 0, plan=p)

    def grad(p: Any) -> None:
        launch.cross_entropy(z, target, o, V, 0, plan=p, lse=lse, dloss=each, grad=g)

    def fused(p: Any) -> None:
        launch.cross_entropy(g[:k], target[:k], o, V, 0, plan=p, dloss=each[:k], grad=g[:k])

    for warps, R in ((8, 4), (4, 4), (8, 1), (4, 1), (16, 4), (32, 2), (32, 4), (16, 8)):
        p = launch.row_plan(V, 2, warps, R)
        times = [median_ms(functools.partial(f, p), 7) for f in (loss, grad, fused)]
        print(f"w{warps} R{R}: loss {times[0]:.3f} grad {times[1]:.3f} both, 1024 rows {times[2]:.4f}", flush=True)


def products_by_chunk() -> None:
    from fla.modules._loss import products

    N, V, H = 4096, 131072, 4096
    z = torch.randn(N, V, device="cuda", dtype=BF)
    w = torch.randn(V, H, device="cuda", dtype=BF) * H**-0.5
    x = torch.randn(N, H, device="cuda", dtype=BF)
    for n in (512, 1024, 2048, 4096):
        dx, c, h, up = torch.empty(n, H, device="cuda", dtype=BF), z[:n], x[:n], 16384 / n
        a = median_ms(functools.partial(products.linear_, c, h, w, None), 5)
        b = median_ms(functools.partial(torch.mm, c, w, out=dx), 5)
        row = f"{n} tokens, scaled to 16k: logits {a * up:.1f} dx {b * up:.1f}"
        for dtype in (BF, F32):
            dw = torch.zeros(V, H, device="cuda", dtype=dtype)
            d, e = (median_ms(functools.partial(products.add_weight_grad, dw, c, h, first=f), 5) for f in (False, True))
            row += f" dw {dtype} add {d * up:.1f} write {e * up:.1f}"
            del dw
        print(row, flush=True)


def main() -> None:
    what = sys.argv[1:] or ["check"]
    if what[0] == "check":
        part, parts = (int(v) for v in what[1:3]) if len(what) > 2 else (0, 1)
        if not check_all(part, parts):
            sys.exit("a check failed")
        what = [w for w in what[1:] if not w.isdigit()]
    if "variants" in what:
        variants()
    if "products" in what:
        products_by_chunk()
    if "sums" in what:
        sums()


if __name__ == "__main__":
    main()
