# SPDX-License-Identifier: MIT
"""Check and time the vector-decay kernels (chunk_kda) on a GPU.

``check_kda.py check [CASE ...]``: every case, each in a process of its own. ``check_kda.py time [SHAPE ...]``: medians
of 11 calls with the L2 flushed between them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "../..")]

import side_by_side  # noqa: E402
from delta_reference import strain  # noqa: E402
from vector_reference import Inputs, make_inputs, ratio, with_gradients  # noqa: E402

from fla.ops._delta.vector_entry import chunk_gdn2, chunk_kda  # noqa: E402

BF, HF, F32 = torch.bfloat16, torch.float16, torch.float32
RAW: dict[str, Any] = {"gate": "raw", "raw_beta": True}
# What float16 has no room for: factors as `strain` takes them, and of the gradients given.
FAR = {"h0": 1e5, "do": 0.01}
PARALLEL = {"beta": 2.0, "parallel": True}

# name -> (inputs, settings of the call)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bounded": ({"T": 512, "H": 4}, {"safe": True}),
    "bounded fp16": ({"T": 512, "H": 4, "dtype": HF}, {"safe": True}),
    "bounded fp16, many heads": ({"T": 192, "H": 70, "B": 2, "dtype": HF}, {"safe": True}),
    "varlen fp16, many heads": (
        {"T": 300, "H": 28, "sequences": 5, "dtype": HF, "v_first": True},
        {"safe": True, "cu": [0, 5, 5, 69, 200, 300], "v_first": True},
    ),
    "far state fp16, many heads": (
        {"T": 200, "H": 35, "HV": 70, "sequences": 1, "dtype": HF},
        {"safe": True, "far": FAR},
    ),
    "parallel fp16, many heads": ({"T": 192, "H": 70, "gate": "weak", "dtype": HF}, {"safe": True, "far": PARALLEL}),
    "kept states fp16, ragged": ({"T": 200, "H": 4, "sequences": 1, "dtype": HF}, {"safe": True, "keep": True}),
    "bounded, many heads": ({"T": 192, "H": 70, "B": 2}, {"safe": True}),
    "ragged, many heads": ({"T": 200, "H": 70, "sequences": 1}, {"safe": True}),
    "varlen, many heads": ({"T": 300, "H": 28, "sequences": 5}, {"safe": True, "cu": [0, 5, 5, 69, 200, 300]}),
    "V256, many heads": ({"T": 200, "H": 40, "V": 256, "sequences": 1}, {"safe": True}),
    "grouped values, many heads": ({"T": 200, "H": 35, "HV": 70, "sequences": 1}, {"safe": True}),
    "kept states, many heads": ({"T": 512, "H": 70, "sequences": 1}, {"safe": True, "keep": True}),
    "gate, states, V first": (
        {**RAW, "T": 256, "H": 4, "sequences": 1, "v_first": True},
        {"lower": -5.0, "sigmoid": 2.0, "v_first": True},
    ),
    "bound -3, no rate": ({**RAW, "T": 200, "H": 2, "V": 64, "A": False, "raw_beta": False}, {"lower": -3.0}),
    "bound -8": ({**RAW, "T": 200, "H": 4, "bias": False, "raw_beta": False}, {"lower": -8.0}),
    "softplus": ({**RAW, "T": 300, "H": 4}, {"sigmoid": 1.0}),
    "exact, mixed": ({"T": 512, "H": 4, "gate": "mixed"}, {}),
    "exact, mixed, ragged, kept": (
        {"T": 300, "B": 2, "H": 2, "HV": 4, "gate": "mixed", "sequences": 2},
        {"keep": True},
    ),
    "exact, mixed, varlen": (
        {"T": 512, "H": 4, "gate": "mixed", "sequences": 6},
        {"cu": [0, 15, 15, 100, 300, 300, 512]},
    ),
    "exact, mixed, fp16": ({"T": 300, "H": 4, "gate": "mixed", "dtype": HF}, {}),
    "exact, mixed, D64": ({"T": 300, "H": 4, "K": 64, "gate": "mixed"}, {}),
    "exact, mixed, D256": ({"T": 200, "H": 2, "K": 256, "gate": "mixed"}, {}),
    "exact, mixed, K100 V60": ({"T": 300, "H": 4, "K": 100, "V": 60, "gate": "mixed", "sequences": 1}, {}),
    "exact, mixed, fp32 gates": ({"T": 300, "H": 4, "gate": "mixed", "g_dtype": F32}, {}),
    "exact, keys normed before": ({"T": 300, "H": 4, "normed": True, "gate": "mixed"}, {"norm": False}),
    "exact, huge queries": ({"T": 300, "H": 2, "normed": True}, {"norm": False, "huge": 3e3}),
    "softplus, mixed": ({"T": 512, "H": 4, "gate": "raw mixed", "raw_beta": True}, {"sigmoid": 1.0}),
    "softplus, mixed, ragged": (
        {"T": 300, "H": 2, "HV": 4, "gate": "raw mixed", "raw_beta": True, "sequences": 1, "v_first": True},
        {"sigmoid": 2.0, "v_first": True},
    ),
    "gdn2, mixed": ({"T": 300, "H": 4, "gate": "mixed", "channels": True}, {}),
    "gdn2, softplus, mixed": ({"T": 256, "H": 4, "gate": "raw mixed", "channels": True}, {}),
    "exact, ragged": ({"T": 300, "B": 2, "H": 2}, {}),
    "exact, -1000, fp16": ({"T": 300, "H": 4, "gate": "extreme", "dtype": HF, "g_dtype": F32}, {}),
    "exact, -1000, kept": ({"T": 300, "H": 4, "gate": "extreme", "sequences": 1}, {"keep": True}),
    "exact, D64, fp16": ({"T": 512, "H": 4, "K": 64, "dtype": HF}, {}),
    "exact, D256, fp16": ({"T": 130, "H": 2, "K": 256, "dtype": HF}, {}),
    "exact, K60 V100, fp16": ({"T": 500, "B": 2, "H": 3, "K": 60, "V": 100, "dtype": HF, "sequences": 2}, {}),
    "K100 V60": ({"T": 300, "H": 4, "K": 100, "V": 60, "sequences": 1}, {"safe": True}),
    "K153 V77": ({"T": 130, "H": 1, "K": 153, "V": 77}, {"safe": True}),
    "K16 V24": ({"T": 200, "H": 4, "K": 16, "V": 24}, {"safe": True}),
    "exact, K16 V24, fp16": ({"T": 200, "H": 4, "K": 16, "V": 24, "dtype": HF}, {}),
    "K64 V256": ({"T": 200, "H": 2, "K": 64, "V": 256}, {"safe": True}),
    "D256": ({"T": 192, "H": 2, "K": 256, "sequences": 1}, {"safe": True}),
    "D256, many heads": ({"T": 192, "H": 34, "K": 256}, {"safe": True}),
    "exact, D256, many heads": ({"T": 150, "H": 34, "K": 256, "sequences": 1}, {}),
    "K192 V192": ({"T": 200, "H": 2, "K": 192, "V": 192}, {"safe": True}),
    "K128 V192": ({"T": 200, "H": 2, "K": 128, "V": 192}, {"safe": True}),
    "exact, K192 V192, fp16": ({"T": 200, "H": 2, "K": 192, "V": 192, "dtype": HF}, {}),
    "grouped values, D64": ({"T": 300, "H": 2, "HV": 4, "K": 64, "sequences": 1}, {"safe": True}),
    "varlen": ({"T": 512, "H": 4, "sequences": 6}, {"safe": True, "cu": [0, 15, 15, 100, 300, 300, 512]}),
    "varlen softplus fp16": (
        {**RAW, "T": 300, "H": 4, "dtype": HF, "sequences": 3, "v_first": True},
        {"sigmoid": 1.0, "cu": [0, 15, 100, 300], "v_first": True},
    ),
    "one token": ({"T": 1, "H": 2, "sequences": 1}, {"safe": True}),
    "few tokens": ({"T": 7, "B": 2, "H": 1}, {"safe": True}),
    "gates at the bound": ({"T": 256, "H": 4, "gate": "bound"}, {"safe": True}),
    "weak decay": ({"T": 512, "H": 4, "gate": "weak"}, {"safe": True}),
    "tiny gradients": ({"T": 256, "H": 4}, {"safe": True, "scale_do": 1e-7}),
    "keys normed before": ({"T": 300, "H": 4, "normed": True}, {"safe": True, "norm": False}),
    "kept states": ({"T": 512, "H": 4, "sequences": 1}, {"safe": True, "keep": True}),
    "time split": ({**RAW, "T": 8192, "H": 1, "sequences": 1}, {"lower": -5.0, "sigmoid": 1.0}),
    "unnormed fp16": ({"T": 300, "H": 4, "normed": True, "dtype": HF}, {"safe": True, "norm": False}),
    "unnormed fp16, exact": ({"T": 300, "H": 4, "normed": True, "dtype": HF}, {"norm": False}),
    "long keys fp16": ({"T": 300, "H": 2, "HV": 4, "normed": True, "dtype": HF}, {"norm": False, "long": 1.4}),
    "long keys fp16, bounded": (
        {"T": 200, "H": 2, "normed": True, "dtype": HF, "sequences": 1},
        {"safe": True, "norm": False, "long": 1.4},
    ),
    "gdn2 unnormed fp16": (
        {"T": 300, "H": 4, "normed": True, "dtype": HF, "channels": True},
        {"safe": True, "norm": False},
    ),
    "gdn2 long keys fp16": (
        {"T": 200, "H": 2, "normed": True, "dtype": HF, "channels": True},
        {"safe": True, "norm": False, "long": 1.2},
    ),
    "far state fp16": ({"T": 192, "H": 4, "dtype": HF, "sequences": 1}, {"safe": True, "far": FAR}),
    "far state fp16, exact": (
        {"T": 100, "H": 4, "normed": True, "dtype": HF, "sequences": 1},
        {"norm": False, "far": {**FAR, "length": 1.0}},
    ),
    "far state fp16, varlen, V first": (
        {**RAW, "T": 300, "H": 2, "HV": 4, "dtype": HF, "sequences": 3, "v_first": True},
        {"sigmoid": 1.0, "cu": [0, 15, 100, 300], "v_first": True, "far": FAR},
    ),
    "far state fp16, D256": ({"T": 64, "H": 2, "K": 256, "dtype": HF, "sequences": 1}, {"safe": True, "far": FAR}),
    "large values fp16": (
        {"T": 128, "H": 4, "gate": "weak", "dtype": HF},
        {"norm": False, "safe": True, "far": {"v": 1e4, "beta": 2.0, "length": 1.0, "do": 0.01}},
    ),
    "parallel fp16": ({"T": 200, "H": 4, "gate": "weak", "dtype": HF, "sequences": 1}, {"safe": True, "far": PARALLEL}),
    "parallel fp16, exact": (
        {"T": 128, "H": 4, "gate": "weak", "dtype": HF},
        {"norm": False, "far": {**PARALLEL, "length": 1.0}},
    ),
    "far gradients fp16": (
        {"T": 128, "H": 4, "dtype": HF, "sequences": 1},
        {"safe": True, "far": {"v": 0.01, "h0": 0.01, "beta": 0.1, "dht": 1e5}},
    ),
    "gdn2 far state fp16": (
        {"T": 100, "H": 4, "dtype": HF, "sequences": 1, "channels": True},
        {"safe": True, "far": FAR},
    ),
    "gdn2": ({"T": 512, "H": 4, "channels": True}, {"safe": True}),
    "gdn2 fp16": ({"T": 300, "H": 4, "channels": True, "dtype": HF}, {"safe": True}),
    "gdn2, exact": ({"T": 300, "B": 2, "H": 2, "channels": True}, {}),
    "gdn2, exact, -1000, fp16": (
        {"T": 300, "H": 4, "gate": "extreme", "dtype": HF, "g_dtype": F32, "channels": True},
        {},
    ),
    "gdn2, gate, V first": (
        {**RAW, "T": 256, "H": 4, "sequences": 1, "v_first": True, "channels": True},
        {"lower": -5.0, "v_first": True},
    ),
    "gdn2, softplus, varlen": (
        {**RAW, "T": 300, "H": 4, "sequences": 3, "channels": True},
        {"cu": [0, 15, 100, 300]},
    ),
    "gdn2, grouped, K100 V60": (
        {"T": 200, "H": 2, "HV": 4, "K": 100, "V": 60, "channels": True, "sequences": 1},
        {"safe": True},
    ),
    "gdn2, D64": ({"T": 300, "H": 4, "K": 64, "channels": True}, {"safe": True}),
    "gdn2, D256": ({"T": 192, "H": 2, "K": 256, "channels": True}, {"safe": True}),
    "gdn2, kept": ({"T": 300, "H": 4, "channels": True, "sequences": 1}, {"safe": True, "keep": True}),
    "gdn2, time split": (
        # With one head, the gradient of A_log is one sum of terms that cancel below rounding.
        {"T": 8192, "H": 4, "sequences": 1, "channels": True, "gate": "raw"},
        {"lower": -5.0},
    ),
    "gdn2, fp32": ({"T": 200, "H": 2, "K": 64, "dtype": F32, "channels": True}, {}),
    "fp32, exact, D64": ({"T": 200, "H": 4, "K": 64, "dtype": F32, "sequences": 1}, {}),
    "fp32, bounded": ({"T": 256, "H": 4, "dtype": F32}, {"safe": True}),
    "fp32, D256": ({"T": 130, "H": 1, "K": 256, "dtype": F32}, {"safe": True}),
}
# B, T, H, D, further inputs and settings
SHAPES: dict[str, tuple[int, int, int, int, dict[str, Any], dict[str, Any]]] = {
    "L": (1, 8192, 96, 128, {}, {"safe": True}),
    "L gate in kernel": (1, 8192, 96, 128, RAW, {"lower": -5.0, "sigmoid": 1.0}),
    "L exact": (1, 8192, 96, 128, {}, {}),
    "L softplus": (1, 8192, 96, 128, RAW, {"sigmoid": 1.0}),
    "L strong": (1, 8192, 96, 128, {"gate": "extreme"}, {}),
    "L fp16": (1, 8192, 96, 128, {"dtype": HF}, {"safe": True}),
    "L unit keys, fp16": (1, 8192, 96, 128, {"dtype": HF, "normed": True}, {"safe": True, "norm": False}),
    "L varlen": (1, 8192, 96, 128, {}, {"safe": True, "cu": [0, 700, 1500, 1564, 4000, 7000, 8192]}),
    "M": (4, 2048, 16, 128, RAW, {"lower": -5.0, "sigmoid": 1.0}),
    "X": (1, 32768, 16, 128, RAW, {"lower": -5.0, "sigmoid": 1.0}),
    "L gdn2": (1, 8192, 96, 128, {"channels": True}, {"safe": True}),
    "L fp32": (1, 8192, 96, 128, {"dtype": F32}, {"safe": True}),
    "D64": (4, 2048, 96, 64, {}, {"safe": True}),
    "D256": (1, 2048, 96, 256, {}, {"safe": True}),
}


def call(y: Inputs, final: bool = True, **s: Any) -> tuple[Tensor, Tensor | None]:
    """The engine itself, past the dispatcher's decision of what it serves."""
    raw, sigmoid, cu = s.get("raw", "A_log" in y or s.get("lower") is not None), s.get("sigmoid", 0.0), s.get("cu")
    if "b" in y:
        o, ht = chunk_gdn2(
            y["q"], y["k"], y["v"], y["g"], y["b"], y["w"], None, y.get("initial_state"), final, s.get("norm", True),
            raw, None if cu is None else torch.as_tensor(cu, device=y["q"].device), None, s.get("safe", False),
            s.get("lower"), s.get("keep", False), False, s.get("v_first", False), A_log=y.get("A_log"),
            dt_bias=y.get("dt_bias"),
        )[:2]  # fmt: skip
        return o, ht
    o, ht = chunk_kda(
        y["q"], y["k"], y["v"], y["g"], y["beta"], None, y.get("initial_state"), final, s.get("norm", True), raw,
        bool(sigmoid), sigmoid == 2.0, s.get("safe", False), s.get("lower"), s.get("keep", False), False,
        s.get("v_first", False), None if cu is None else torch.as_tensor(cu, device=y["q"].device),
        A_log=y.get("A_log"), dt_bias=y.get("dt_bias"),
    )[:2]  # fmt: skip
    return o, ht


def check(name: str, device: str = "cuda") -> dict[str, Any]:
    """Errors of one case ("err"), those over the limit ("wrong"), and whether three runs agree bit for bit."""
    start = time.time()
    inputs, settings = CASES[name]
    x = make_inputs(**{"K": 128, "dtype": BF, **inputs}, device=device)
    settings = dict(settings)
    x["k"] = (x["k"] * settings.pop("long", 1.0)).to(x["k"].dtype)
    x["q"] = (x["q"] * settings.pop("huge", 1.0)).to(x["q"].dtype)
    far = dict(settings.pop("far", {}))
    size = far.pop("do", settings.get("scale_do", 1.0))
    size_ht = far.pop("dht", size)
    x = strain(x, **far)
    dtype = x["q"].dtype
    gen = torch.Generator(device=device).manual_seed(1)
    do = (torch.randn(x["v"].shape, generator=gen, device=device) * size).to(dtype)
    runs: list[Inputs] = []
    for _ in range(3):
        y = {n: t.clone().requires_grad_() for n, t in x.items()}
        o, ht = call(y, **settings)
        assert ht is not None
        dht = torch.randn(ht.shape, generator=gen.manual_seed(2), device=device) * size_ht
        grads = torch.autograd.grad((o, ht), list(y.values()), (do, dht))
        runs.append({"o": o.detach(), "ht": ht.detach(), **dict(zip(y, grads, strict=True))})
    with torch.no_grad():
        inference, _ = call(x, **settings)
    known = {n: v for n, v in settings.items() if n in ("norm", "lower", "sigmoid", "v_first", "cu")}
    raw = inputs.get("gate", "")[:3] == "raw"
    ref = with_gradients(x, do, dht, raw=raw, **known)
    err = {n: ratio(runs[0][n], ref[n]) for n in ref}
    err["inference"] = ratio(inference, runs[0]["o"])
    forward, backward = (1e-4, 1e-4) if dtype == F32 else (5e-3, 1e-2)
    wrong = {n: e for n, e in err.items() if not e < (forward if n in ("o", "ht", "inference") else backward)}
    same = all(torch.equal(r[n], runs[0][n]) for r in runs for n in ref)
    return {"err": err, "wrong": wrong, "same": same, "seconds": time.time() - start}


def median(fn: Callable[[], Any], flush: Tensor, times: int = 11) -> float:
    fn()
    fn()
    out = []
    for _ in range(times):
        flush.zero_()
        torch.cuda._sleep(3_000_000)  # launches hide behind it: what is left is the kernels' time
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        fn()
        b.record()
        torch.cuda.synchronize()
        out.append(a.elapsed_time(b))
    return sorted(out)[times // 2]


# What one NVIDIA H200 must reach: inference, forward and forward + backward in milliseconds.
MUST: dict[str, tuple[float | None, float | None, float | None]] = {
    "L": (None, 1.4, 5.0),
    "L gate in kernel": (1.15, None, None),
    "M": (0.22, None, None),
    "X": (1.0, None, None),
}


def timing(name: str) -> str:
    """One line: milliseconds of the kernels (host_cost.py has the caller's), and peak memory above the inputs."""
    B, T, H, D, inputs, settings = SHAPES[name]
    x = make_inputs(B, T, H, K=D, device="cuda", **{"dtype": BF, **inputs})
    y = {n: t.requires_grad_() for n, t in x.items()}
    do = torch.randn_like(x["v"])
    flush = torch.empty(1 << 27, dtype=torch.int8, device="cuda")
    if "cu" in settings:
        # Copied in each call, they would have the launches wait for what hides them.
        settings = {**settings, "cu": torch.tensor(settings["cu"], device="cuda")}

    def both() -> None:
        o, _ = call(y, final=False, **settings)
        torch.autograd.grad(o, list(y.values()), do)

    def inference() -> None:
        with torch.no_grad():
            call(y, final=False, **settings)

    both()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    both()
    peak = (torch.cuda.max_memory_allocated() - before) / 1e9
    train = lambda: call(y, final=False, **settings)
    found = [median(fn, flush) for fn in (inference, train, both)]
    text = (
        f"{name:18s} inference {found[0]:.3f}  forward {found[1]:.3f}  forward + backward {found[2]:.3f} ms  "
        f"peak {peak:.2f} GB"
    )
    if name in MUST and "H200" in torch.cuda.get_device_name():
        good = all(limit is None or ms <= limit for ms, limit in zip(found, MUST[name], strict=True))
        limits = " / ".join("-" if limit is None else f"{limit}" for limit in MUST[name])
        text += f"  must {limits}: {'ok' if good else 'OVER'}"
    return text


def main() -> None:
    if sys.argv[1] == "check":
        # A case, or the beginnings of the names of several.
        given = sys.argv[2:] or [""]
        begin = tuple(g for g in given if g not in CASES)
        names = [c for c in CASES if c in given or c.startswith(begin)]
        green = True
        for name, r in side_by_side.run(__file__, names):
            good = "fail" not in r and not r["wrong"] and r["same"]
            green = green and good
            errors = r["fail"] if "fail" in r else " ".join(f"{n}={e:.1e}" for n, e in r["err"].items())
            steady = "" if r.get("same", True) else "UNSTEADY"
            print("ok " if good else "BAD", f"{name:24s}", errors, steady, f"{r.get('seconds', 0):.0f}s", flush=True)
        sys.exit(not green)
    elif sys.argv[1] == "worker":
        side_by_side.answer(check)
    else:
        print(torch.cuda.get_device_name(), "torch", torch.__version__)
        lines = []
        for n in sys.argv[2:] or SHAPES:
            lines.append(timing(n))
            print(lines[-1], flush=True)
        sys.exit(any(text.endswith("OVER") for text in lines))


if __name__ == "__main__":
    main()
