# SPDX-License-Identifier: MIT
# ruff: noqa: E402  (the path comes first)
"""Check the norm, elementwise, rotary and token shift kernels on a GPU against the PyTorch path in float64.

`check_rows.py` runs every case four times, forward and backward; `check_rows.py I N` every N-th case from the I-th.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parents[2])]

from fla.backends import last_decision
from fla.modules import activations
from fla.modules.norm import fused_norm_gate, l2norm, layernorm, layernorm_gated
from fla.modules.rotary import rotary_embedding
from fla.modules.token_shift import token_shift

BF, HF, F32 = torch.bfloat16, torch.float16, torch.float32

Case = tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]


def rows(fn: Callable[..., Any], shape: tuple[int, ...], names: str, dtype: torch.dtype, **kw: Any) -> Case:
    """``names``: tensors like the rows, ``w``/``b``: parameters; upper case: float32 whatever ``dtype`` is."""
    D = shape[-1]
    tensors: dict[str, Any] = {}
    for name in names.split():
        kind = F32 if name.isupper() else dtype
        size = (D,) if name.lower() in ("weight", "bias", "norm_weight", "norm_bias") else shape
        if name.startswith("linear_"):
            size = (48, D) if name == "linear_weight" else (48,)
        if name in ("weight", "bias") and "linear" in fn.__name__:
            size = (48, D) if name == "weight" else (48,)
        tensors[name.lower()] = (size, kind)
    return fn, tensors, kw


def cases() -> dict[str, Case]:
    L, G, M, A = layernorm, fused_norm_gate, layernorm_gated, activations
    found: dict[str, Case] = {}

    def add(name: str, *args: Any, **kw: Any) -> None:
        found[name] = rows(*args, **kw)

    # Every class of the policy: widths to the widest, few rows and many.
    for D in (1, 50, 64, 100, 128, 256, 1000, 1024, 2048, 4096, 5120, 8192, 16384):
        add(f"rms {D}", L.rms_norm, (37, D), "x WEIGHT", BF, bias=None)
        add(f"rms many {D}", L.rms_norm, (max(300, (1 << 21) // D) + 3, D), "x weight", BF, bias=None)
    for D in (128, 1000, 4096, 16384):
        add(f"layer {D}", L.layer_norm, (2, 333, D), "x WEIGHT BIAS", BF)
        add(f"layer residual {D}", L.layer_norm, (2, 333, D), "x weight bias RESIDUAL", HF, prenorm=True)
        add(f"l2 {D}", l2norm.l2norm, (2, 700, D), "x", BF)
        add(f"l2 fp32 {D}", l2norm.l2norm, (2, 77, D), "x", F32)
        add(f"gated {D}", G.rms_norm_gated, (2, 600, D), "x g weight", BF, bias=None)
        add(f"gated sigmoid {D}", G.layer_norm_gated, (2, 60, D), "x g WEIGHT BIAS", HF, activation="sigmoid")
    for n in (1, 2, 32, 2000):
        add(f"rows {n}", L.rms_norm, (n, 512), "x weight bias residual", BF, prenorm=True)
    add("l2 many 128", l2norm.l2norm, (8, 4001, 128), "x", BF)
    add("l2 float", l2norm.l2norm, (300, 64), "x", BF, output_dtype=F32)
    add("gated many 128", G.rms_norm_gated, (8, 4001, 128), "x g weight", BF, bias=None)
    add("gated residual", G.rms_norm_gated, (70, 1200), "x g weight residual", BF, bias=None, prenorm=True)
    add("group", L.group_norm, (999, 2048), "x weight bias residual", BF, num_groups=16)
    add("group rms odd", L.group_norm, (99, 150), "x weight", HF, bias=None, num_groups=3, is_rms_norm=True)
    add("stream fp32", L.rms_norm, (99, 512), "x weight", BF, bias=None, prenorm=True, residual_in_fp32=True)
    add("no weight", L.layer_norm, (99, 512), "x", BF, weight=None, bias=None)
    for before in (True, False):
        add(f"mamba {before}", M.layernorm_fn, (700, 1024), "x weight bias z", BF, group_size=256,
            norm_before_gate=before, is_rms_norm=True)  # fmt: skip
        add(f"mamba layer {before}", M.layernorm_fn, (70, 1024), "x weight bias z", BF, norm_before_gate=before)
    linear = "norm_weight norm_bias linear_weight linear_bias residual"
    add("norm linear", L.layer_norm_linear, (2, 99, 256), f"x {linear}", BF, prenorm=True)
    add("gated linear", G.rms_norm_swish_gate_linear, (99, 256), f"x g {linear}", BF)
    for fn in (A.sigmoid, A.logsigmoid, A.swish, A.elu_p1, A.sqrelu, A.fast_gelu_impl):
        add(fn.__name__, fn, (3, 333, 67), "x", BF)
        add(f"{fn.__name__} fp32", fn, (3, 333, 64), "x", F32)
    for fn in (A.swiglu, A.sigmoidglu, A.powglu):
        add(fn.__name__, fn, (3, 333, 67), "x y", BF)
        add(f"{fn.__name__} even", fn, (1030, 4096), "x y", BF)
        add(f"{fn.__name__} fp32", fn, (33, 64), "x y", F32)
    for fn in (A.swiglu_linear, A.sigmoidglu_linear, A.powglu_linear):
        add(fn.__name__, fn, (3, 33, 128), "x y weight bias", BF)
    add("halves", lambda p: A.swiglu(*p.chunk(2, -1)), (300, 2048), "p", BF)
    add("halves odd", lambda p: A.swiglu(*p.chunk(2, -1)), (301, 202), "p", BF)
    cu = torch.tensor([0, 5, 5, 6, 400, 1000])
    for heads, D, R in ((1, 128, 64), (3, 64, 32), (32, 128, 64), (5, 128, 32), (7, 80, 17), (64, 128, 64)):
        for il in (False, True):
            name = f"rotary H{heads} D{D} R{R}{' interleaved' if il else ''}"
            more: dict[str, Any] = {"tables": (1100, R), "interleaved": il}
            found[name] = rotary_embedding, {"x": ((2, 777, heads, D), BF)}, {**more, "seqlen_offsets": 3}
            found[f"{name} varlen"] = (
                rotary_embedding, {"x": ((1, 1000, heads, D), BF)},
                {**more, "cu_seqlens": cu, "seqlen_offsets": torch.tensor([0, 3, 99, -100, 5])},
            )  # fmt: skip
    found["rotary few"] = rotary_embedding, {"x": ((3, 1, 16, 128), HF)}, {"tables": (9, 64), "seqlen_offsets": 8}
    found["rotary many"] = rotary_embedding, {"x": ((2, 4096, 32, 128), BF)}, {"tables": (4096, 64)}
    found["rotary fp32"] = rotary_embedding, {"x": ((2, 99, 4, 64), F32)}, {"tables": (99, 32)}
    for D in (64, 100, 4096):
        for dtype in (BF, F32):
            shift = token_shift, {"x": ((3, 333, D), dtype), "cache": ((3, D), dtype)}, {"output_cache": True}
            found[f"token shift {D} {dtype}"] = shift
    found["token shift"] = token_shift, {"x": ((2, 5, 64), BF)}, {}
    found["token shift varlen"] = (
        token_shift, {"x": ((1, 1000, 512), BF), "cache": ((5, 512), BF)}, {"cu_seqlens": cu, "output_cache": True}
    )  # fmt: skip
    return found


CASES = cases()


def ratio(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double(), b.double()
    return ((a - b).norm() / (b.norm() + 1e-12)).item()


def run(fn: Callable[..., Any], tensors: dict[str, torch.Tensor], kw: dict[str, Any], grads: list[Any]) -> list[Any]:
    leaves = {n: t.detach().clone().requires_grad_() for n, t in tensors.items()}
    out = fn(**leaves, **kw)
    out = out if isinstance(out, tuple) else (out,)
    if not grads:
        grads += [torch.randn(o.shape, device=o.device).to(o.dtype) for o in out]
    return [
        *out,
        *torch.autograd.grad(out, list(leaves.values()), [g.to(o.dtype) for g, o in zip(grads, out, strict=True)]),
    ]


def check(name: str) -> tuple[list[float], str]:
    """Errors of outputs and gradients, and what is wrong."""
    fn, sizes, kw = CASES[name]
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = {n: torch.randn(size, device=device).to(kind) for n, (size, kind) in sizes.items()}
    kw = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in kw.items()}
    exact = dict(kw)
    if "tables" in kw:
        angle = torch.rand(kw.pop("tables"), device=device) * 6
        exact.pop("tables")
        dtype = next(iter(tensors.values())).dtype
        kw["cos"], kw["sin"] = angle.cos().to(dtype), angle.sin().to(dtype)
        exact["cos"], exact["sin"] = kw["cos"].double(), kw["sin"].double()
    if kw.get("output_dtype") is not None:
        exact["output_dtype"] = None
    grads: list[Any] = []
    got = run(fn, tensors, kw, grads)
    decision = last_decision()
    wrong = "" if decision is not None and decision.backend == "triton" else f"ran on {decision} "
    # The second call is watched, later ones run what was written down.
    for _ in range(3):
        again = run(fn, tensors, kw, grads)
        if not all(torch.equal(a, b) for a, b in zip(got, again, strict=True)):
            wrong += "unsteady "
    want = run(fn, {n: t.double() for n, t in tensors.items()}, exact, grads)
    errors = [ratio(a, b) for a, b in zip(got, want, strict=True)]
    single = all(kind == F32 for _, kind in sizes.values())
    n = len(got) - len(sizes)
    for i, error in enumerate(errors):
        limit = 1e-4 if single else 5e-3 if i < n else 1e-2
        # The gradient of a row of one channel is nothing but rounding.
        if not error < limit and want[i].abs().max() > 1e-3:
            wrong += f"[{i}] {error:.1e} "
    return errors, wrong


def main() -> None:
    first, step = (int(a) for a in sys.argv[1:3]) if len(sys.argv) > 2 else (0, 1)
    green = True
    for name in list(CASES)[first::step]:
        t = time.time()
        try:
            errors, wrong = check(name)
        except Exception as e:
            errors, wrong = [], repr(e)[:300]
        green = green and not wrong
        print(
            f"{'ok ' if not wrong else 'BAD'} {name:28s} {time.time() - t:4.1f}s {max(errors, default=0):.1e} {wrong}",
            flush=True,
        )
    print("GREEN" if green else "RED", first, step, flush=True)
    sys.exit(not green)


if __name__ == "__main__":
    main()
