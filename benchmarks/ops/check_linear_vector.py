# SPDX-License-Identifier: MIT
"""Check and time the kernels of the linear engine with a decay per channel on a GPU.

``check_linear_vector.py check [CASE ...]``: every case against the float64 recurrence, side by side,
three times over. ``decode``: token by token. ``time [SHAPE ...]``: whole calls; ``public OP ...``: public ops;
``kernels [SHAPE ...]``: each kernel by variants of its launch, which ``warm [SHAPE ...]`` compiles before.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "../..")]

import side_by_side  # noqa: E402
from linear_vector_reference import make_inputs, ratio, recurrence, with_gradients  # noqa: E402

from fla.ops._common.policy import Launch, chip_of  # noqa: E402
from fla.ops._linear.vector import VectorCall, Work  # noqa: E402
from fla.ops._linear.vector_autograd import vector_linear  # noqa: E402
from fla.ops._linear.vector_entry import tokens  # noqa: E402
from fla.ops._linear.vector_policy import vector_plan  # noqa: E402

BF, HF, F32 = torch.bfloat16, torch.float16, torch.float32
INF = float("inf")

# name -> (inputs, settings: "cu", "v_first", "reverse", "change" of the plan, "segments")
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "L": ({"T": 128, "H": 96, "gate_dtype": BF}, {}),
    "plain": ({"T": 512, "H": 4, "gate_dtype": BF}, {}),
    "ragged, states": ({"T": 300, "H": 4, "B": 2, "initial": True}, {}),
    "bonus": ({"T": 300, "H": 4, "bonus": True, "initial": True}, {}),
    "values": ({"T": 300, "H": 4, "gate": "gv", "V": 64, "initial": True}, {}),
    "strong": ({"T": 300, "H": 4, "strength": 10.0, "initial": True}, {}),
    "-inf": ({"T": 300, "H": 4, "low": -INF, "initial": True, "gate_dtype": BF}, {}),
    "fp16": ({"T": 512, "H": 4, "dtype": HF, "initial": True}, {}),
    "varlen": ({"T": 512, "H": 4, "sequences": 6, "initial": True}, {"cu": [0, 15, 15, 100, 300, 300, 512]}),
    "D64": ({"T": 300, "H": 4, "K": 64, "initial": True}, {}),
    "K64 V128": ({"T": 256, "H": 70, "K": 64, "V": 128, "initial": True}, {}),
    "values, many heads": ({"T": 256, "H": 70, "gate": "gv", "V": 64, "gate_dtype": BF}, {}),
    "bonus, many heads": ({"T": 256, "H": 70, "bonus": True, "gate_dtype": BF}, {}),
    "only tree": ({"T": 256, "H": 4, "gate_dtype": BF}, {"change": {"fast": 0}}),
    "fp32 gates": ({"T": 512, "H": 4}, {}),
    "V first, many heads": ({"T": 320, "H": 70, "initial": True, "v_first": True}, {"v_first": True}),
    "fp32": ({"T": 150, "H": 2, "K": 64, "dtype": F32, "initial": True}, {}),
    "split": ({"T": 1000, "H": 2, "initial": True}, {"segments": 4}),
    "K60 V100 fp16": ({"T": 200, "H": 3, "B": 2, "K": 60, "V": 100, "dtype": HF, "initial": True}, {}),
    "values V first varlen": (
        {"T": 256, "H": 4, "gate": "gv", "initial": True, "v_first": True, "sequences": 2},
        {"cu": [0, 100, 256], "v_first": True},
    ),
    "D256": ({"T": 192, "H": 2, "K": 256, "initial": True}, {}),
    "many heads": ({"T": 192, "H": 70, "B": 2, "gate_dtype": BF}, {}),
    "K33 V65": ({"T": 200, "H": 3, "K": 33, "V": 65}, {}),
    "strong bf16 gates": ({"T": 256, "H": 70, "strength": 10.0, "gate_dtype": BF}, {}),
    "-20": ({"T": 256, "H": 4, "shift": -20.0}, {}),
    "bonus strong": ({"T": 256, "H": 4, "bonus": True, "strength": 20.0, "low": -INF}, {}),
    "fp16 many heads": ({"T": 512, "H": 70, "dtype": HF, "initial": True}, {}),
    "values strong": ({"T": 256, "H": 4, "gate": "gv", "strength": 20.0, "low": -INF}, {}),
    "fp32 128": ({"T": 150, "H": 70, "dtype": F32}, {}),
    "K256 V64": ({"T": 192, "H": 70, "K": 256, "V": 64}, {}),
    "K64 V256": ({"T": 192, "H": 70, "K": 64, "V": 256}, {}),
    "split varlen": ({"T": 700, "H": 2, "initial": True, "sequences": 3}, {"segments": 4, "cu": [0, 3, 500, 700]}),
    "reverse": ({"T": 200, "H": 2, "initial": True, "sequences": 2}, {"reverse": True, "cu": [0, 70, 200]}),
    "no tree": ({"T": 256, "H": 4, "shift": 3.0}, {}),
    "only tree, many heads": ({"T": 256, "H": 70, "initial": True}, {"change": {"fast": 0}}),
    "-1000": ({"T": 300, "H": 4, "low": -1000.0}, {}),
    "0 and -30": ({"T": 256, "H": 4, "low": -30.0, "strength": 0.0}, {}),
    "no decay": ({"T": 512, "H": 4, "strength": 0.0}, {}),
    "fp16 strong": ({"T": 300, "H": 4, "dtype": HF, "strength": 10.0}, {}),
    "varlen fp16 D64": ({"T": 300, "H": 4, "K": 64, "dtype": HF}, {"cu": [0, 15, 100, 300]}),
    "K128 V64": ({"T": 300, "H": 4, "V": 64}, {}),
    "K16 V24": ({"T": 200, "H": 4, "K": 16, "V": 24}, {}),
    "K32": ({"T": 200, "H": 4, "K": 32}, {}),
    "K153 V77": ({"T": 130, "H": 2, "K": 153, "V": 77}, {}),
    "D512": ({"T": 130, "H": 1, "K": 512}, {}),
    "K320 V512": ({"T": 130, "H": 1, "K": 320, "V": 512, "dtype": HF}, {}),
    "split by policy": ({"T": 4096, "H": 1, "K": 64, "initial": True}, {}),
    "bonus only tree": ({"T": 256, "H": 4, "bonus": True}, {"change": {"fast": 0}}),
    "bonus fp16 K100": ({"T": 130, "H": 4, "K": 100, "bonus": True, "dtype": HF}, {}),
    "values only tree": ({"T": 256, "H": 4, "gate": "gv", "V": 32}, {"change": {"fast": 0}}),
    "fp32 strong": ({"T": 150, "H": 2, "dtype": F32, "strength": 20.0}, {}),
    "fp32 K256": ({"T": 100, "H": 2, "K": 256, "V": 64, "dtype": F32, "initial": True}, {}),
    "fp32 K512": ({"T": 70, "H": 1, "K": 512, "V": 64, "dtype": F32}, {}),
    "fp32 values": ({"T": 100, "H": 2, "K": 64, "V": 32, "gate": "gv", "dtype": F32}, {}),
    "fp32 bonus": ({"T": 100, "H": 2, "K": 64, "bonus": True, "dtype": F32}, {}),
    "T1": ({"T": 1, "B": 2, "H": 2, "initial": True}, {}),
    "tiny gradients": ({"T": 256, "H": 4}, {"scale_do": 1e-7}),
}
# name -> inputs
DECODES: dict[str, dict[str, Any]] = {
    "gk": {},
    "gk, V first": {"v_first": True},
    "gv": {"gate": "gv", "V": 64},
    "both": {"gate": "both", "K": 64, "V": 100},
    "bonus": {"bonus": True},
    "bonus K64": {"bonus": True, "K": 64, "low": -INF},
}
# B, T, H, K, V, further inputs
SHAPES: dict[str, tuple[int, int, int, int, int, dict[str, Any]]] = {
    "L": (1, 8192, 96, 128, 128, {}),
    "L fp32 gates": (1, 8192, 96, 128, 128, {"gate_dtype": F32}),
    "L strong": (1, 8192, 96, 128, 128, {"strength": 10.0}),
    "L rwkv6": (1, 8192, 96, 128, 128, {"bonus": True}),
    "L slots": (1, 8192, 96, 64, 128, {}),
    "L into slots": (1, 8192, 96, 128, 64, {"gate": "gv"}),
    "M": (4, 2048, 16, 128, 128, {}),
    "X": (1, 32768, 16, 128, 128, {}),
}


def _plan(x: dict[str, Tensor], change: dict[str, Any], sequences: int) -> Any:
    k, v = (x["v"], x["k"]) if "gv" in x else (x["k"], x["v"])
    dtype = str(k.dtype).removeprefix("torch.")
    plan = vector_plan(chip_of(k.device), dtype, k.shape[-1], v.shape[-1], heads=sequences * k.shape[2])
    return dataclasses.replace(plan, **change)


def check(name: str, device: str = "cuda") -> dict[str, Any]:
    """Errors of one case ("err"), those over the limit ("wrong"), and whether three runs agree bit for bit."""
    inputs, s = CASES[name]
    cu, change, scale_do = s.get("cu"), s.get("change"), s.get("scale_do", 1.0)
    sequences = len(cu) - 1 if cu else None
    x = make_inputs(**{"K": 128, "dtype": BF, "sequences": sequences, **inputs}, device=device)
    dtype = x["q"].dtype
    gen = torch.Generator(device=device).manual_seed(1)
    do = (torch.randn(x["v"].shape, generator=gen, device=device) * scale_do).to(dtype)
    make: dict[str, Any] = {"segments": s["segments"]} if "segments" in s else {}
    if change:
        make["plan"] = _plan(x, change, sequences or x["q"].shape[0])
    kw: dict[str, Any] = {"v_first": s.get("v_first", False), "cu": cu, "reverse": s.get("reverse", False)}
    call = {"state_v_first": kw["v_first"], "reverse": kw["reverse"], **make}
    call["cu_seqlens"] = torch.tensor(cu, device=device) if cu else None
    runs: list[dict[str, Tensor]] = []
    for _ in range(3):
        y = {n: t.clone().requires_grad_() for n, t in x.items()}
        o, ht = vector_linear(**y, output_final_state=True, **call)
        assert ht is not None
        dht = torch.randn(ht.shape, generator=gen.manual_seed(2), device=device) * scale_do
        grads = torch.autograd.grad((o, ht), list(y.values()), (do.to(o.dtype), dht))
        runs.append({"o": o.detach(), "ht": ht.detach(), **dict(zip(y, grads, strict=True))})
    ref = with_gradients(x, do, dht, **kw)
    err = {n: ratio(runs[0][n] / (scale_do if n in x else 1), ref[n] / (scale_do if n in x else 1)) for n in ref}
    forward, backward = (1e-4, 1e-4) if dtype == F32 else (5e-3, 1e-2)
    wrong = {n: e for n, e in err.items() if not e < (forward if n in ("o", "ht") else backward)}
    same = all(torch.equal(r[n], runs[0][n]) for r in runs for n in ref)
    return {"err": err, "wrong": wrong, "same": same}


def check_decode(name: str) -> dict[str, float]:
    """Errors of one case token by token."""
    x = make_inputs(**{"B": 4, "T": 3, "H": 8, "K": 128, "dtype": BF, "initial": True, **DECODES[name]}, device="cuda")
    v_first = DECODES[name].get("v_first", False)
    args = (x["q"], x["k"], x["v"], x.get("gk"), x.get("gv"), x.get("bonus"), None, x["initial_state"])
    with torch.no_grad():
        o, ht = tokens(*args, True, False, v_first, None)
    ref = recurrence({n: t.double() for n, t in x.items()}, v_first=v_first)
    assert ht is not None
    return {"o": ratio(o, ref[0]), "ht": ratio(ht, ref[1])}


def check_all(names: list[str]) -> bool:
    good = 0
    for name, r in side_by_side.run(__file__, names):
        errors = r["fail"] if "fail" in r else " ".join(f"{n} {e:.1e}" for n, e in r["err"].items())
        bad = " FAILED" if "fail" in r else f" WRONG {sorted(r['wrong'])}" if r["wrong"] else ""
        good += not bad and r["same"]
        print(f"{name:24s} {errors}{bad}{'' if r.get('same', True) else ' UNSTEADY'}", flush=True)
    print(f"{good} of {len(names)} cases right", flush=True)
    return good == len(names)


def median(fn: Callable[[], Any], flush: Tensor, times: int = 11) -> float:
    """Device milliseconds: the queue is kept busy while the call is launched."""
    fn()
    out = []
    for _ in range(times):
        flush.zero_()
        torch.cuda._sleep(400_000)
        a, b = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        a.record()
        fn()
        b.record()
        torch.cuda.synchronize()
        out.append(a.elapsed_time(b))
    return sorted(out)[times // 2]


def _inputs(shape: str, T: int | None = None) -> dict[str, Tensor]:
    B, length, H, K, V, more = SHAPES[shape]
    T = length if T is None else T
    return make_inputs(B, T, H, K, V, device="cuda", **{"dtype": BF, "gate_dtype": BF, **more})


def whole(shape: str, flush: Tensor) -> str:
    x = {n: t.requires_grad_() for n, t in _inputs(shape).items()}
    do = torch.randn_like(x["v"])
    t = time.time()
    o, _ = vector_linear(**x)
    torch.cuda.synchronize()
    first = time.time() - t
    torch.autograd.grad(o, list(x.values()), do)
    torch.cuda.synchronize()
    row = f"{shape}: first call {first:.1f} s, with backward {time.time() - t:.1f} s"
    del o

    def both() -> None:
        torch.autograd.grad(vector_linear(**x)[0], list(x.values()), do)

    torch.cuda.reset_peak_memory_stats()
    m0 = torch.cuda.memory_allocated()
    both()
    torch.cuda.synchronize()
    row += f", peak {(torch.cuda.max_memory_allocated() - m0) / 1e9:.2f} GB"
    with torch.no_grad():
        row += f", fwd {median(lambda: vector_linear(**x), flush):.3f}"
    return row + f", fwd+bwd {median(both, flush):.3f} ms"


def _variants(plan: Any) -> dict[str, dict[str, Any]]:
    return {
        "plan": {},
        "kb64 s3, grad gkb128 8w": {"prep": Launch(4, 3), "gkb": 128, "grad": Launch(8)},
        "kb32 s3 r168, save bv128": {"kb": 32, "prep": Launch(4, 3, 168), "bv_save": 128, "save": Launch(8, 3)},
        "kb64 s2 r168 per 2, bv64 s3": {"per": 2, "bv": 64, "scan": Launch(4, 3), "save": Launch(4, 4)},
        "kb128 s1 per 1, scan s4": {"kb": 128, "per": 1, "prep": Launch(4), "scan": Launch(8, 4)},
    }


def _work(x: dict[str, Tensor], plan: Any) -> Work:
    call = VectorCall.make(x["k"], x["v"], 1.0, False, None, plan=plan, segments=1)
    return Work(call, x["q"], x["k"], x["v"], x["gk"], x.get("bonus"), None)


def _launch_all(work: Work, v: Tensor, do: Tensor) -> dict[str, Callable[[], Any]]:
    work.prep()
    states = work.scan(v, None, out=False, save=True)[1]
    exits = work.scan(do, None, reverse=True, save=True)[1]
    assert states is not None
    work.scan(v, None)
    work.grad(do, states, exits)
    return {
        "prep": work.prep,
        "scan": lambda: work.scan(v, None),
        "save": lambda: work.scan(v, None, out=False, save=True),
        "reverse": lambda: work.scan(do, None, reverse=True, save=True),
        "grad": lambda: work.grad(do, states, exits),
    }


def kernels(shape: str, flush: Tensor) -> None:
    x = _inputs(shape)
    do = torch.randn_like(x["v"])
    base = _plan(x, {}, x["q"].shape[0])
    for name, change in _variants(base).items():
        row = {}
        try:
            for kernel, fn in _launch_all(_work(x, dataclasses.replace(base, **change)), x["v"], do).items():
                row[kernel] = median(fn, flush, 7)
            print(f"{shape} {name}: " + "  ".join(f"{n} {ms:.3f}" for n, ms in row.items()), flush=True)
        except Exception as e:
            print(f"{shape} {name}: {row} {e!r:.120}", flush=True)


def warm(shapes: list[str], workers: int) -> None:
    """Compile what `time` and `kernels` will need, in parallel."""
    jobs = [["warmed", shape, name] for shape in shapes for name in ["", *_variants(None)]]
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda job: subprocess.run([sys.executable, __file__, *job], check=False), jobs))


def _warm_one(shape: str, name: str) -> None:
    x = _inputs(shape, 128)
    if not name:
        y = {n: t.requires_grad_() for n, t in x.items()}
        torch.autograd.grad(vector_linear(**y)[0].sum(), list(y.values()))
        return
    plan = dataclasses.replace(_plan(x, {}, x["q"].shape[0]), **_variants(None)[name])
    _launch_all(_work(x, plan), x["v"], torch.zeros_like(x["v"]))


def _public(name: str) -> tuple[Callable[..., Any], dict[str, Tensor]]:
    """A public op, and its inputs at B1 T8192 H96 D128 ("chunk_gsa": 64 slots)."""
    import fla.ops

    if name == "chunk_gsa":
        x = _inputs("L slots")
        rn = torch.randn(1, 8192, 96, 128, device="cuda").to(BF)
        x = {"q": rn, "k": rn.flip(1), "v": x["v"], "s": x["k"].float().softmax(-1).to(BF), "g": x["gk"]}
    else:
        x = _inputs("L rwkv6" if name == "chunk_rwkv6" else "L")
        names = {"q": "r", "gk": "w", "bonus": "u"} if name == "chunk_rwkv6" else {"gk": "g"}
        x = {names.get(n, n): t for n, t in x.items()}
    return getattr(fla.ops, name), x


def public(name: str, flush: Tensor) -> None:
    fn, x = _public(name)
    t = time.time()
    with torch.no_grad():
        o = fn(**x)[0]
        torch.cuda.synchronize()
        row = f"{name}: first call {time.time() - t:.1f} s, fwd {median(lambda: fn(**x), flush):.3f}"
    x = {n: t.requires_grad_() for n, t in x.items()}
    do = torch.randn_like(o)
    del o

    def both() -> None:
        torch.autograd.grad(fn(**x)[0], list(x.values()), do)

    both()
    torch.cuda.synchronize()
    first = time.time() - t
    torch.cuda.reset_peak_memory_stats()
    m0 = torch.cuda.memory_allocated()
    both()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - m0) / 1e9
    row += f", fwd+bwd {median(both, flush):.3f} ms, all compiled after {first:.1f} s, peak {peak:.2f} GB"
    print(row, flush=True)


def main() -> None:
    what, names = (sys.argv[1:2] or ["check"])[0], sys.argv[2:]
    if what == "decode":
        for name in DECODES:
            print(f"decode {name}:", {n: f"{e:.1e}" for n, e in check_decode(name).items()}, flush=True)
        return
    if what == "worker":
        return side_by_side.answer(check)
    if what == "warm":
        return warm(names, int(os.environ.get("WORKERS", "12")))
    if what == "warmed":
        return _warm_one(*names)
    if what == "check":
        sys.exit(0 if check_all(names or list(CASES)) else 1)
    flush = torch.empty(1 << 27, dtype=torch.int8, device="cuda")
    for shape in names or list(SHAPES):
        if what == "public":
            public(shape, flush)
        elif what == "time":
            print(whole(shape, flush), flush=True)
        else:
            kernels(shape, flush)


if __name__ == "__main__":
    main()
