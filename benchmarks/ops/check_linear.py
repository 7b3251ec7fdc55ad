# SPDX-License-Identifier: MIT
# ruff: noqa: E402, B023  (the path comes first; closures are called before the loop goes on)
"""Check and time the scalar-decay kernels of the linear engine on a GPU.

`check_linear.py check` compares every case with the float64 recurrence, forward and backward, three times over;
`check_linear.py time` times whole calls, `kernels` each kernel with variants of its launch. No argument: check, time.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from check_delta import SHAPES, median_ms
from delta_reference import ratio
from linear_reference import make_inputs, recurrence, with_gradients

from fla.ops._common.policy import Launch, chip_of
from fla.ops._linear import scalar
from fla.ops._linear.autograd import scalar_linear
from fla.ops._linear.policy import scalar_plan
from fla.ops._linear.scalar import ScalarCall

BF, HF, F32 = torch.bfloat16, torch.float16, torch.float32
L = Launch


def scans(launch: Launch, block_v: int) -> dict:
    return {"forward": launch, "recompute": launch, "reverse": launch, "block_v": block_v}


# name -> (input settings, plan changes)
CASES: dict[str, tuple[dict, dict]] = {
    "bv128": ({"T": 300, "H": 4}, scans(L(8, 3), 128)),
    "bv64": ({"T": 300, "H": 4, "initial": True}, scans(L(4, 3), 64)),
    "bv64 s2": ({"T": 256, "H": 4}, scans(L(4, 2), 64)),
    "head decay": ({"T": 300, "H": 4, "gate": "head", "initial": True}, {}),
    "no decay": ({"T": 200, "H": 2, "gate": None}, {}),
    "varlen vfirst": ({"T": 300, "H": 2, "cu": [0, 5, 5, 69, 200, 300], "initial": True, "v_first": True}, {}),
    "strong": ({"T": 256, "H": 2, "shift": -20.0}, {}),
    "-1000": ({"T": 256, "H": 2, "low": -1000.0}, {}),
    "-inf": ({"T": 256, "H": 2, "low": -float("inf"), "initial": True}, {}),
    "K64": ({"T": 300, "H": 2, "K": 64}, {}),
    "K16 V32": ({"T": 130, "H": 2, "K": 16, "V": 32}, {}),
    "K32 fp16": ({"T": 130, "H": 2, "K": 32, "dtype": HF}, {}),
    "K60 fp16": ({"T": 200, "H": 3, "K": 60, "dtype": HF}, {}),
    "K33 V65": ({"T": 200, "H": 3, "K": 33, "V": 65}, {}),
    "K100": ({"T": 200, "H": 4, "K": 100}, {}),
    "K128 V64": ({"T": 200, "H": 2, "K": 128, "V": 64}, {}),
    "K64 V128 fp16": ({"T": 200, "H": 2, "K": 64, "V": 128, "dtype": HF}, {}),
    "K256": ({"T": 200, "H": 2, "K": 256, "initial": True}, {}),
    "K256 fp16 varlen": ({"T": 200, "H": 2, "K": 256, "dtype": HF, "cu": [0, 100, 200]}, {}),
    "split": ({"T": 1000, "H": 2, "initial": True}, {"segments": 4}),
    "split varlen": ({"T": 700, "H": 2, "initial": True, "cu": [0, 3, 500, 700]}, {"segments": 4}),
    "T1": ({"T": 1, "B": 2, "H": 2, "initial": True}, {}),
    "T63 B2": ({"T": 63, "B": 2, "H": 2}, {}),
    "pointers": ({"T": 200, "H": 2}, {"descriptors": False}),
    "fp32": ({"T": 150, "H": 2, "K": 64, "dtype": F32}, {}),
    "fp32 128": ({"T": 150, "H": 2, "dtype": F32, "initial": True}, {}),
    "fp32 256": ({"T": 100, "H": 2, "K": 256, "dtype": F32}, {}),
}


def check(name: str) -> tuple[dict[str, float], dict[str, object]]:
    """Errors and what is wrong with a case."""
    settings, change = CASES[name]
    s = {"K": 128, "dtype": BF, **settings}
    cu, low, dtype = s.pop("cu", None), s.pop("low", None), s["dtype"]
    x = make_inputs(**s, device="cuda", sequences=len(cu) - 1 if cu else None)
    if low is not None:
        x["g"][:, ::5] = low
    change = dict(change)
    segments, vf = change.pop("segments", None), s.get("v_first", False)
    heads = x["v"].shape[2] * (len(cu) - 1 if cu else x["v"].shape[0])
    plan = scalar_plan(chip_of(x["q"].device), dtype, x["q"].shape[-1], x["v"].shape[-1], heads)
    plan = dataclasses.replace(plan, **change)
    do = torch.randn_like(x["v"].float()).to(dtype)
    dht = first = None
    wrong: dict[str, object] = {}
    for _ in range(3):
        y = {n: t.clone().requires_grad_(n != "g_gamma") for n, t in x.items()}
        o, ht = scalar_linear(
            **y, output_final_state=True, state_v_first=vf, plan=plan, segments=segments,
            cu_seqlens=torch.tensor(cu, device="cuda") if cu else None,
        )  # fmt: skip
        dht = torch.randn_like(ht) if dht is None else dht
        leaves = {n: t for n, t in y.items() if t.requires_grad}
        grads = torch.autograd.grad((o.float() * do.float()).sum() + (ht * dht).sum(), list(leaves.values()))
        got = {"o": o.detach(), "ht": ht.detach(), **dict(zip(leaves, grads, strict=True))}
        if first is None:
            first = got
        elif any(not torch.equal(got[n], first[n]) for n in got):
            wrong["unsteady"] = [n for n in got if not torch.equal(got[n], first[n])]
    assert first is not None
    ref = with_gradients(x, do, dht, v_first=vf, cu=cu)
    errors = {n: ratio(first[n], ref[n]) for n in ref}
    limit = 1e-4 if dtype == F32 else 5e-3
    bad = [n for n, e in errors.items() if not e < (limit if n in ("o", "ht") or dtype == F32 else 2 * limit)]
    return errors, {**wrong, "wrong": bad} if bad else wrong


def check_decode() -> bool:
    green = True
    for vf in (False, True):
        for gate in (None, "token", "head"):
            x = make_inputs(B=4, T=3, H=8, K=128, dtype=BF, device="cuda", gate=gate, initial=True, v_first=vf)
            with torch.no_grad():
                o, ht = scalar_linear(**x, output_final_state=True, state_v_first=vf, tokens=True)
            ref = recurrence({n: t.double() for n, t in x.items()}, v_first=vf)
            errors = ratio(o, ref[0]), ratio(ht, ref[1])
            green = green and max(errors) < 5e-3
            print(f"decode {gate} v_first={vf}: o {errors[0]:.1e} ht {errors[1]:.1e}", flush=True)
    return green


def check_all() -> bool:
    green = True
    for name in CASES:
        t = time.time()
        try:
            errors, wrong = check(name)
        except Exception as e:
            errors, wrong = {}, {"fail": repr(e)[:300]}
        green = green and not wrong
        row = " ".join(f"{n} {e:.1e}" for n, e in errors.items())
        print(f"{name:17s} {time.time() - t:5.1f}s {row} {wrong or ''}", flush=True)
    return check_decode() and green


VARIANTS = {
    f"{bv}w{w}s{s}": scans(L(w, s), bv) for bv, w, s in ((128, 8, 3), (128, 8, 2), (64, 4, 3), (64, 4, 2), (32, 4, 3))
}


def kernels(shape: str, gate: str | None = "token") -> None:
    """Milliseconds of sums, forward, recompute, reverse and gradients by launch."""
    B, T, H, D = SHAPES[shape]
    x = make_inputs(B, T, H, D, dtype=BF, device="cuda", gate=gate)
    q, k, v, g, gamma = x["q"], x["k"], x["v"], x.get("g"), x.get("g_gamma")
    base = scalar_plan(chip_of(q.device), BF, D, D, B * H)
    decay = 1 if g is not None else 2 if gamma is not None else 0
    do = torch.randn_like(v)
    for name, change in {"plan": {}, **VARIANTS, "grad8": {"grad": L(8)}}.items():
        plan = dataclasses.replace(base, **change)
        call = ScalarCall.make(k, v, D**-0.5, decay, False, None, plan=plan, segments=1)
        try:
            sums = scalar.decay_sums(call, g)
            S = scalar.scan(call, q, k, v, sums, gamma, None, None, False, False, True)[2]
            _, X = scalar.reverse(call, q, k, do, sums, gamma, None, None)
            assert S is not None
            run = {
                "sums": lambda: scalar.decay_sums(call, g),
                "forward": lambda: scalar.scan(call, q, k, v, sums, gamma, None, None, True, False, False),
                "recompute": lambda: scalar.scan(call, q, k, v, sums, gamma, None, None, False, False, True),
                "reverse": lambda: scalar.reverse(call, q, k, do, sums, gamma, None, None),
                "grad": lambda: scalar.gradients(call, q, k, v, g, sums, gamma, do, S, X),
            }
            row = "  ".join(f"{n} {median_ms(fn):.3f}" for n, fn in run.items())
        except Exception as e:
            row = repr(e)[:100]
        print(f"{shape} {name}: {row}", flush=True)


def whole(shape: str, dtype=BF, gate: str | None = "token", cu: list[int] | None = None) -> None:
    B, T, H, D = SHAPES[shape]
    y = make_inputs(B, T, H, D, dtype=dtype, device="cuda", gate=gate)
    leaves = [t.requires_grad_() for n, t in y.items() if n != "g_gamma"]
    do = torch.randn_like(y["v"])
    cut = None if cu is None else torch.tensor(cu, device="cuda")

    def fwd():
        return scalar_linear(**y, cu_seqlens=cut)[0]

    def both():
        torch.autograd.grad(fwd(), leaves, do)

    t = time.time()
    both()
    torch.cuda.synchronize()
    row = [f"first {time.time() - t:.2f}s"]
    torch.cuda.reset_peak_memory_stats()
    m0 = torch.cuda.memory_allocated()
    both()
    torch.cuda.synchronize()
    row.append(f"peak {(torch.cuda.max_memory_allocated() - m0) / 2**30:.2f}GiB")
    for name, fn in (("fwd", fwd), ("fwd+bwd", both)):
        with torch.set_grad_enabled(name != "fwd"):
            row.append(f"{name} kernel {median_ms(fn, 15, 1_500_000):.3f} caller {median_ms(fn, 15, 0):.3f}")
    print(f"{shape} {str(dtype)[6:]} {gate} decay{' varlen' if cu else ''}: " + "  ".join(row), flush=True)


def main() -> None:
    what = sys.argv[1:] or ["check", "time"]
    import triton

    print(torch.cuda.get_device_name(0), torch.__version__, triton.__version__)
    if "check" in what and not check_all():
        sys.exit("no timing: a check failed")
    if "kernels" in what:
        kernels("L")
        kernels("M")
    if "time" in what:
        for gate in ("token", "head", None):
            whole("L", gate=gate)
        for shape in ("M", "X", "D64", "D256"):
            whole(shape)
        whole("L", HF)
        whole("L", cu=[0, 1000, 1100, 3000, 5500, 7000, 8192])


if __name__ == "__main__":
    main()
