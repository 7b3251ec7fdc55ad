# SPDX-License-Identifier: MIT
# ruff: noqa: E402  (the path comes first)
"""Check and time the scalar-decay kernels of the linear engine on a GPU.

``check_linear.py check [CASE ...]``: every case against the float64 recurrence, forward and backward, three times over,
side by side. ``time [SHAPE ...]``: whole calls. ``kernels [SHAPE ...]``: each kernel with variants of
its launch; ``warm`` compiles those beforehand.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import side_by_side
from check_delta import SHAPES, median_ms
from delta_reference import ratio
from linear_reference import make_inputs, normalized, normalized_with_gradients, recurrence, with_gradients

from fla.ops._common.policy import Launch, chip_of
from fla.ops._linear import scalar
from fla.ops._linear.autograd import scalar_linear
from fla.ops._linear.normalizer import normalized_linear
from fla.ops._linear.policy import scalar_plan
from fla.ops._linear.scalar import Decays, ScalarCall

BF, HF, F32 = torch.bfloat16, torch.float16, torch.float32
L = Launch


def fwd(launch: Launch, block_v: int) -> dict:
    return {"forward": launch, "block_v": block_v, "groups": 0}


def sta(launch: Launch, block_v: int) -> dict:
    return {"states": launch, "states_v": block_v}


def gra(launch: Launch, block_k: int, block_v: int) -> dict:
    return {"grad": launch, "grad_k": block_k, "grad_v": block_v}


# Launches of each kernel that are compared at D = 128.
FORWARD = {f"f{v}w{w}s{s}": fwd(L(w, s), v) for v, w, s in ((128, 8, 3), (64, 4, 3))}
STATES = {f"s{v}w{w}s{s}": {"both": False, **sta(L(w, s), v)} for v, w, s in ((64, 4, 3),)}
DV = {
    "r128w8s3": {"both": False, "block_v": 128, "reverse": L(8, 3)},
    "o128w4": {"both": False, "dv_scan": False, "out": L(4, 1), "out_v": 128},
    "o64w4": {"both": False, "dv_scan": False, "out_v": 64},
}  # fmt: skip
BOTH = {f"b{v}s{s}": {"both": True, "both_v": v, "both_stages": s} for v, s in ((64, 3), (64, 2))}
THRICE = {"m4": (4, {}), "m8": (8, {})}
GRAD = {
    "g128,128w4": gra(L(4), 128, 128), "g128,64w4": gra(L(4), 128, 64), "g64,128w4": gra(L(4), 64, 128),
    "g128,128w8": gra(L(8), 128, 128),
}  # fmt: skip

# States beyond 65504, results below it.
RANGE = {"initial_state": 1e6, "q": 1e-2, "do": 1e-3}

# name -> (input settings, plan changes)
CASES: dict[str, tuple[dict, dict]] = {
    "plan": ({"T": 300, "H": 4, "initial": True}, {}),
    "many heads": ({"T": 200, "H": 70, "initial": True}, {}),
    "head decay": ({"T": 300, "H": 4, "gate": "head", "initial": True}, {}),
    "no decay": ({"T": 200, "H": 2, "gate": None}, {}),
    "head decay many": ({"T": 200, "H": 70, "gate": "head"}, {}),
    "no decay many": ({"T": 200, "H": 70, "gate": None}, {}),
    "varlen vfirst": ({"T": 300, "H": 2, "cu": [0, 5, 5, 69, 200, 300], "initial": True, "v_first": True}, {}),
    "many": ({"T": 512, "H": 70, "initial": True}, {}),
    "many varlen": ({"T": 300, "H": 24, "cu": [0, 5, 5, 69, 200, 300], "initial": True}, {}),
    "many V256": ({"T": 320, "H": 70, "V": 256, "initial": True, "v_first": True}, {}),
    "many -1000": ({"T": 256, "H": 70, "low": -1000.0}, {}),
    "head decay varlen vfirst": (
        {"T": 300, "H": 24, "cu": [0, 5, 5, 69, 200, 300], "initial": True, "v_first": True, "gate": "head"},
        {},
    ),
    "many Triton": ({"T": 300, "H": 70, "initial": True}, {"groups": 0}),
    "few Triton": ({"T": 300, "H": 2, "cu": [0, 5, 5, 69, 200, 300], "initial": True}, {"groups": 0}),
    "marks head Triton": ({"T": 500, "H": 70, "gate": "head", "initial": True}, {"marks": 3, "groups": 0}),
    "marks none Triton": ({"T": 500, "H": 70, "gate": None, "initial": True}, {"marks": 3, "groups": 0}),
    "strong": ({"T": 256, "H": 2, "shift": -20.0}, {}),
    "strong fp16": ({"T": 200, "H": 2, "shift": -20.0, "dtype": HF, "K": 64, "initial": True}, {}),
    "-1000": ({"T": 256, "H": 2, "low": -1000.0}, {}),
    "-inf": ({"T": 256, "H": 2, "low": -float("inf"), "initial": True}, {}),
    "zero g": ({"T": 256, "H": 2, "low": 0.0}, {}),
    "K64": ({"T": 300, "H": 2, "K": 64}, {}),
    "K16 V32": ({"T": 130, "H": 2, "K": 16, "V": 32}, {}),
    "K32 fp16": ({"T": 130, "H": 2, "K": 32, "dtype": HF}, {}),
    "range fp16": ({"T": 300, "H": 2, "dtype": HF, "initial": True, "shift": 8.0, "times": RANGE}, {}),
    "range many fp16": ({"T": 300, "H": 70, "dtype": HF, "initial": True, "shift": 8.0, "times": RANGE}, {}),
    "range none fp16": ({"T": 300, "H": 70, "gate": None, "dtype": HF, "initial": True, "times": RANGE}, {}),
    "range K256 fp16": (
        {"T": 200, "H": 2, "K": 256, "dtype": HF, "initial": True, "shift": 8.0, "times": RANGE},
        {},
    ),
    "K60 fp16": ({"T": 200, "H": 3, "K": 60, "dtype": HF}, {}),
    "K33 V65": ({"T": 200, "H": 3, "K": 33, "V": 65}, {}),
    "K100": ({"T": 200, "H": 4, "K": 100}, {}),
    "K128 V64": ({"T": 200, "H": 2, "K": 128, "V": 64}, {}),
    "K64 V128 fp16": ({"T": 200, "H": 2, "K": 64, "V": 128, "dtype": HF}, {}),
    "K64 V256": ({"T": 200, "H": 2, "K": 64, "V": 256}, {}),
    "K192 V96": ({"T": 130, "H": 2, "K": 192, "V": 96, "initial": True}, {}),
    "K256": ({"T": 200, "H": 2, "K": 256, "initial": True}, {}),
    "K256 fp16 varlen": ({"T": 200, "H": 2, "K": 256, "dtype": HF, "cu": [0, 100, 200]}, {}),
    "K512": ({"T": 130, "H": 1, "K": 512, "initial": True}, {}),
    "split": ({"T": 1000, "H": 2, "initial": True}, {"segments": 4}),
    "split varlen": ({"T": 700, "H": 2, "initial": True, "cu": [0, 3, 500, 700]}, {"segments": 4}),
    "split head": ({"T": 1000, "H": 2, "gate": "head", "initial": True}, {"segments": 4}),
    "split K256": ({"T": 600, "H": 1, "K": 256, "initial": True}, {"segments": 4}),
    "T1": ({"T": 1, "B": 2, "H": 2, "initial": True}, {}),
    "T63 B2": ({"T": 63, "B": 2, "H": 2}, {}),
    "pointers": ({"T": 200, "H": 2}, {"descriptors": False}),
    "reverse": ({"T": 200, "H": 2, "initial": True, "reverse": True}, {}),
    "reverse varlen": ({"T": 200, "H": 2, "initial": True, "reverse": True, "cu": [0, 30, 30, 200]}, {}),
    "fp32": ({"T": 150, "H": 2, "K": 64, "dtype": F32}, {}),
    "fp32 128": ({"T": 150, "H": 2, "dtype": F32, "initial": True}, {}),
    "fp32 256": ({"T": 100, "H": 2, "K": 256, "dtype": F32}, {}),
    "dv by chunks": ({"T": 200, "H": 4, "initial": True}, {"dv_scan": False}),
    "K32 V16": ({"T": 130, "H": 2, "K": 32, "V": 16}, {}),
    "both": ({"T": 200, "H": 4, "initial": True}, {"both": True}),
    "both many": ({"T": 300, "H": 70, "initial": True}, {"both": True}),
    "both split": ({"T": 1000, "H": 2, "initial": True}, {"both": True, "segments": 4}),
    "both wide": ({"T": 300, "H": 70}, {"both": True, "both_v": 128}),
    "apart": ({"T": 300, "H": 70, "initial": True}, {"both": False}),
    "marks head": ({"T": 500, "H": 70, "gate": "head", "initial": True}, {"marks": 3}),
    "marks none": ({"T": 600, "H": 70, "gate": None, "initial": True, "v_first": True}, {"marks": 3}),
    "none fp16": ({"T": 300, "H": 70, "gate": None, "dtype": HF, "initial": True}, {}),
    "marks K64 V128": ({"T": 600, "H": 70, "K": 64, "V": 128, "gate": "head", "initial": True}, {"marks": 3}),
    "marks varlen": (
        {"T": 900, "H": 70, "gate": "head", "initial": True, "cu": [0, 5, 5, 69, 500, 900]},
        {"marks": 2},
    ),
    "split none": ({"T": 1000, "H": 2, "gate": None, "initial": True}, {"segments": 4}),
    "head strong": ({"T": 300, "H": 70, "gate": "head", "shift": -20.0}, {}),
    "head fp16": ({"T": 300, "H": 70, "gate": "head", "dtype": HF, "initial": True}, {}),
}


def check(name: str) -> tuple[dict[str, float], dict[str, object]]:
    """Errors and what is wrong with a case."""
    settings, change = CASES[name]
    s = {"K": 128, "dtype": BF, **settings}
    cu, low, dtype, reverse = s.pop("cu", None), s.pop("low", None), s["dtype"], s.pop("reverse", False)
    times = s.pop("times", {})
    x = make_inputs(**s, device="cuda", sequences=len(cu) - 1 if cu else None)
    x = {n: t * times[n] if n in times else t for n, t in x.items()}
    if low is not None:
        x["g"][:, ::5] = low
    change = dict(change)
    segments, marks, vf = change.pop("segments", None), change.pop("marks", None), s.get("v_first", False)
    heads = x["v"].shape[2] * (len(cu) - 1 if cu else x["v"].shape[0])
    plan = scalar_plan(chip_of(x["q"].device), dtype, x["q"].shape[-1], x["v"].shape[-1], heads)
    plan = dataclasses.replace(plan, **change)
    do = (torch.randn_like(x["v"].float()) * times.get("do", 1.0)).to(dtype)
    dht = first = None
    wrong: dict[str, object] = {}
    for _ in range(3):
        y = {n: t.clone().requires_grad_(n != "g_gamma") for n, t in x.items()}
        o, ht = scalar_linear(
            **y, output_final_state=True, state_v_first=vf, plan=plan, segments=segments, marks=marks,
            reverse=reverse, cu_seqlens=torch.tensor(cu, device="cuda") if cu else None,
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
    ref = with_gradients(x, do, dht, v_first=vf, cu=cu, reverse=reverse)
    errors = {n: ratio(first[n], ref[n]) for n in ref}
    limit = 1e-4 if dtype == F32 else 5e-3
    bad = [n for n, e in errors.items() if not e < (limit if n in ("o", "ht") or dtype == F32 else 2 * limit)]
    return errors, {**wrong, "wrong": bad} if bad else wrong


NORMALIZED: dict[str, dict] = {
    "n:plan": {"T": 300, "H": 4},
    "n:many": {"T": 200, "H": 70},
    "n:fp16 varlen": {"T": 300, "H": 2, "K": 64, "dtype": HF, "cu": [0, 5, 5, 69, 200, 300]},
    "n:K256": {"T": 150, "H": 2, "K": 256, "V": 64},
    "n:fp32": {"T": 150, "H": 2, "K": 60, "V": 40, "dtype": F32},
    "n:reverse": {"T": 150, "H": 2, "reverse": True},
}


def check_normalized(name: str, device: str = "cuda") -> tuple[dict[str, float], list[str]]:
    """Errors of normalised linear attention through its public op, and which are over the limit."""
    from fla.backends import use_backend
    from fla.ops.linear_attn import chunk_linear_attn, fused_recurrent_linear_attn

    s = {"K": 128, "dtype": BF, "gate": None, "initial": True, **NORMALIZED[name]}
    cu, reverse, dtype = s.pop("cu", None), s.pop("reverse", False), s["dtype"]
    x = make_inputs(**s, device=device, sequences=len(cu) - 1 if cu else None)
    x["q"], x["k"] = (torch.nn.functional.elu(x[n]) + 1 for n in ("q", "k"))
    h0 = x["initial_state"]
    x["z"] = torch.rand(h0.shape[0], 1, *h0.shape[1:3], device=device) * 10
    y = {n: t.clone().requires_grad_() for n, t in x.items()}
    args = y["q"], y["k"], y["v"], None, (y["initial_state"], y["z"]), True
    cut = None if cu is None else torch.tensor(cu, device=device)
    with use_backend("triton", strict=True):
        if reverse:
            o, (ht, z) = fused_recurrent_linear_attn(*args, True, True, cut)
        else:
            o, (ht, z) = chunk_linear_attn(*args, True, cut)
    weights = [torch.randn_like(t.detach().float()).to(t.dtype) for t in (o, ht, z)]
    loss = sum((a.float() * w.float()).sum() for a, w in zip((o, ht, z), weights, strict=True))
    grads = torch.autograd.grad(loss, list(y.values()))
    ref, want = normalized_with_gradients(x, weights, cu=cu, reverse=reverse)
    errors = {n: ratio(a, b) for n, a, b in zip(("o", "ht", "zt"), (o, ht, z), ref, strict=True)}
    errors |= {n: ratio(a, want[n]) for n, a in zip(y, grads, strict=True)}
    limit = 1e-4 if dtype == F32 else 5e-3
    return errors, [n for n, e in errors.items() if not e < limit * (1 if n in ("o", "ht", "zt") else 2)]


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
    x = make_inputs(B=4, T=3, H=8, K=128, dtype=BF, device="cuda", gate=None)
    x["q"], x["k"] = (torch.nn.functional.elu(x[n]) + 1 for n in ("q", "k"))
    o, ht, z = normalized_linear(**x, final=True, tokens=True)
    errors = tuple(
        ratio(a, b) for a, b in zip((o, ht, z), normalized({n: t.double() for n, t in x.items()}), strict=True)
    )
    print("decode normalised", errors)
    green = green and max(errors) < 5e-3
    return green


def outcome(name: str) -> side_by_side.Result:
    """Errors of a case ("err"), and what is wrong with it."""
    if name == "decode":
        return {"err": {}, "wrong": [] if check_decode() else ["decode"]}
    errors, wrong = check_normalized(name) if name in NORMALIZED else check(name)
    return {"err": errors, "wrong": wrong}


def check_all(names: list[str]) -> bool:
    green = True
    for name, r in side_by_side.run(__file__, names or [*CASES, *NORMALIZED, "decode"]):
        wrong = r.get("fail") or r["wrong"]
        green = green and not wrong
        row = " ".join(f"{n} {e:.1e}" for n, e in r.get("err", {}).items())
        print(f"{name:17s} {row} {f'FAIL {wrong}' if wrong else ''}", flush=True)
    print("all right" if green else "NOT all right")
    return green


def kernels(shape: str, gate: str | None = "token", run: bool = True) -> None:
    """Milliseconds of each kernel by launch; ``run=False`` compiles them only."""
    B, T, H, D = SHAPES[shape]
    x = make_inputs(B, T if run else 128, H, D, dtype=BF, device="cuda", gate=gate)
    q, k, v, g, gamma = x["q"], x["k"], x["v"], x.get("g"), x.get("g_gamma")
    base = scalar_plan(chip_of(q.device), BF, D, D, B * H)
    decay = 1 if g is not None else 2 if gamma is not None else 0
    do = torch.randn_like(v)
    row: list[str] = []

    def clock(kind: str, name: str, change: dict, S=None, X=None, marks: int = 1):
        plan = dataclasses.replace(base, **change)
        call = ScalarCall.make(k, v, D**-0.5, decay, False, None, plan=plan, segments=1, marks=marks)
        try:
            decays = Decays(scalar.decay_sums(call, g), gamma)
            entry = scalar.marked(call, k)
            fn = {
                "sums": lambda: scalar.decay_sums(call, g),
                "forward": lambda: scalar.forward(call, q, k, v, decays, None, entry, False, mark=entry is not None),
                "states": lambda: scalar.states(call, q, k, v, do, decays, None, None, None, None),
                "thrice": lambda: scalar.thrice(call, q, k, v, do, decays, None, None, None, entry),
                "grad": lambda: scalar.gradients(call, q, k, v, g, decays, do, S, X),
            }[kind]
            if kind == "thrice":
                scalar.forward(call, q, k, v, decays, None, entry, False, mark=entry is not None)
            out = fn()
            torch.cuda.synchronize()
            if run:
                row.append(f"{kind} {name} {median_ms(fn):.3f}")
            return out
        except Exception as e:
            print(f"{shape} {kind} {name}: {e!r:.100}", flush=True)

    clock("sums", "", {})
    for name, change in FORWARD.items():
        clock("forward", name, change)
    if gate != "token":
        clock("forward", "m4", {}, marks=4)
        for name, (marks, change) in THRICE.items():
            clock("thrice", name, change, marks=marks)
    S, X, _ = clock("states", "plan", {})
    for name, change in {**STATES, **DV, **BOTH}.items() if gate == "token" else ():
        clock("states", name, change)
    for name, change in GRAD.items() if gate == "token" else (("plan", {}),):
        clock("grad", name, change, S, X)
    print(f"{shape} {gate}: " + "  ".join(row), flush=True)


def whole(shape: str, dtype=BF, gate: str | None = "token", cu: list[int] | None = None) -> None:
    B, T, H, D = SHAPES[shape]
    y = make_inputs(B, T, H, D, dtype=dtype, device="cuda", gate=gate)
    leaves = [t.requires_grad_() for n, t in y.items() if n != "g_gamma"]
    do = torch.randn_like(y["v"])
    cut = None if cu is None else torch.tensor(cu, device="cuda")

    def forward():
        return scalar_linear(**y, cu_seqlens=cut)[0]

    def both():
        torch.autograd.grad(forward(), leaves, do)

    t = time.time()
    both()
    torch.cuda.synchronize()
    row = [f"first {time.time() - t:.2f}s"]
    torch.cuda.reset_peak_memory_stats()
    m0 = torch.cuda.memory_allocated()
    both()
    torch.cuda.synchronize()
    row.append(f"peak {(torch.cuda.max_memory_allocated() - m0) / 2**30:.2f}GiB")
    for name, fn in (("fwd", forward), ("fwd+bwd", both)):
        with torch.set_grad_enabled(name != "fwd"):
            row.append(f"{name} kernel {median_ms(fn, 15, 1_500_000):.3f} caller {median_ms(fn, 15, 0):.3f}")
    print(f"{shape} {str(dtype)[6:]} {gate} decay{' varlen' if cu else ''}: " + "  ".join(row), flush=True)


TIMED = {
    "L token": ("L", BF, "token"), "L head": ("L", BF, "head"), "L none": ("L", BF, None),
    "M token": ("M", BF, "token"), "X token": ("X", BF, "token"),
    "D64": ("D64", BF, "token"), "D256": ("D256", BF, "token"),
    "L fp16": ("L", HF, "token"), "L varlen": ("L", BF, "token", [0, 1000, 1100, 3000, 5500, 7000, 8192]),
}  # fmt: skip


def main() -> None:
    what, names = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("check", [])
    if what == "worker":
        return side_by_side.answer(outcome)
    import triton

    print(torch.cuda.get_device_name(0), torch.__version__, triton.__version__)
    if what == "check":
        sys.exit(not check_all(names))
    for name in names or (TIMED if what == "time" else ("L", "M")):
        if what == "time":
            whole(*TIMED[name])
        else:
            shape, *gate = name.split("/")
            kernels(shape, (None if gate == ["none"] else gate[0]) if gate else "token", run=what == "kernels")


if __name__ == "__main__":
    main()
