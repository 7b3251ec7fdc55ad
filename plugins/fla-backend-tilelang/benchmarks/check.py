# SPDX-License-Identifier: MIT
# ruff: noqa: E402  (the path comes first)
"""Check the TileLang programs on a card against the float64 recurrence, then time them: `check.py check|time`.

A few processes share the cases: programs are built side by side.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "plugins/fla-backend-tilelang/src"), str(ROOT / "benchmarks/ops"), str(ROOT)]

import vector_reference as wide_reference
from check_delta import SHAPES, median_ms
from delta_reference import make_inputs, ratio, recurrence
from fla_backend_tilelang import scalar, vector

WORKERS = 4
BF, HF = torch.bfloat16, torch.float16
# name -> (inputs, changes of the call)
CASES: dict[str, tuple[dict, dict]] = {
    "plain": ({"T": 256, "H": 4, "K": 128}, {}),
    "many": ({"T": 192, "H": 160, "K": 128}, {}),
    "ragged": ({"B": 2, "T": 301, "H": 3, "K": 128, "initial": True}, {}),
    "short": ({"B": 2, "T": 37, "H": 3, "K": 128, "initial": True}, {}),
    "one": ({"B": 2, "T": 1, "H": 3, "K": 128, "initial": True}, {}),
    "states": ({"B": 2, "T": 256, "H": 3, "K": 128, "initial": True, "v_first": True}, {}),
    "packed": ({"T": 700, "H": 3, "K": 128, "initial": True, "sequences": 5}, {"cu": [0, 5, 5, 69, 400, 700]}),
    "packed fp16": ({"T": 700, "H": 3, "K": 64, "dtype": HF}, {"cu": [0, 64, 192, 193, 700]}),
    "grouped": ({"T": 200, "H": 2, "HV": 6, "K": 128, "initial": True}, {}),
    "gate": ({"T": 200, "H": 2, "K": 128, "gate": "kernel", "raw_beta": True}, {"sigmoid": 2.0}),
    "no decay": ({"T": 200, "H": 2, "K": 128, "gate": None}, {}),
    "normed": ({"T": 200, "H": 2, "K": 128, "norm": False}, {}),
    "K64 V128": ({"T": 200, "H": 2, "K": 64, "V": 128, "initial": True}, {}),
    "K128 V64 fp16": ({"T": 200, "H": 2, "K": 128, "V": 64, "dtype": HF, "initial": True}, {}),
    "strong": ({"T": 256, "H": 2, "K": 128, "shift": -20.0}, {}),
}
# What float16 does not hold: on unit keys, and on keys that the kernel norms.
LARGE = {"B": 2, "T": 100, "H": 2, "K": 64, "V": 128, "dtype": HF}
CASES["long"] = ({"T": 200, "H": 2, "K": 128, "norm": False}, {"wild": "long"})
for _wild in ("state", "values", "parallel", "long"):
    CASES[f"fp16 {_wild}"] = ({**LARGE, "norm": False, "initial": True}, {"wild": _wild})
CASES["fp16 lengths"] = ({**LARGE, "initial": True}, {"wild": "lengths"})


def make_wild(x: dict[str, torch.Tensor], how: str | None) -> None:
    """States of 1e5, values of 1e4 with beta 2, unit keys that are nearly one, or keys of several lengths: 0 to
    1000 times their own where the kernel norms them (lengths), 1 to 300 where it does not (long)."""
    if how == "state":
        x["initial_state"] *= 1e5
    elif how == "values":
        x["v"] *= 1e4
        x["beta"].fill_(2.0)
    elif how == "parallel":
        near = x["k"][:, :1].float() + 0.02 * x["k"].float()
        x["k"] = torch.nn.functional.normalize(near, dim=-1).to(x["k"].dtype)
        x["beta"].fill_(2.0)
    elif how == "lengths":
        at = torch.arange(x["k"].shape[1], device=x["k"].device)
        x["k"] *= torch.tensor([1e3, 1e-3, 1.0, 0.0], device=at.device)[at % 4][None, :, None, None].to(x["k"].dtype)
        x["v"] *= 1e3
    elif how == "long":
        at = torch.arange(x["k"].shape[1], device=x["k"].device)
        length = torch.tensor([30.0, 1.0, 300.0, 3.0], device=at.device)[at % 4]
        x["k"] *= length[None, :, None, None].to(x["k"].dtype)
        x["beta"] = (x["beta"].float() / (length**2)[None, :, None]).to(x["beta"].dtype)


RAW = {"gate": "raw", "raw_beta": True}
# name -> (inputs, lower bound or None for log decays, changes of the call)
VECTOR: dict[str, tuple[dict, float | None, dict]] = {
    "kda": ({"T": 256, "H": 4, "K": 128}, None, {}),
    "kda many": ({"T": 192, "H": 160, "K": 128}, None, {}),
    "kda gate": ({**RAW, "T": 256, "H": 4, "K": 128}, -5.0, {"sigmoid": 1.0}),
    "kda gate, no rate": ({**RAW, "T": 256, "H": 4, "K": 128, "A": False, "bias": False}, -3.0, {"sigmoid": 2.0}),
    "kda ragged": ({"B": 2, "T": 301, "H": 3, "K": 128, "sequences": 2}, None, {}),
    "kda one": ({"B": 2, "T": 1, "H": 3, "K": 128, "sequences": 2}, None, {}),
    "kda states": ({"B": 2, "T": 96, "H": 3, "K": 128, "sequences": 2, "v_first": True}, None, {}),
    "kda packed": ({"T": 700, "H": 3, "K": 128, "sequences": 5}, None, {"cu": [0, 5, 5, 69, 400, 700]}),
    "kda packed fp16": ({"T": 700, "H": 3, "K": 64, "dtype": HF}, None, {"cu": [0, 64, 192, 193, 700]}),
    "kda grouped": ({"T": 200, "H": 2, "HV": 6, "K": 128, "sequences": 1}, None, {}),
    "kda normed": ({"T": 200, "H": 2, "K": 128, "normed": True}, None, {}),
    "kda K64 V128": ({"T": 200, "H": 2, "K": 64, "V": 128}, None, {}),
    "kda K128 V64 fp16": ({"T": 200, "H": 2, "K": 128, "V": 64, "dtype": HF}, None, {}),
    "kda bound": ({"T": 256, "H": 4, "K": 128, "gate": "bound"}, None, {}),
    "kda weak": ({"T": 256, "H": 4, "K": 128, "gate": "weak"}, None, {}),
}
VECTOR["kda long"] = ({"T": 200, "H": 2, "K": 128, "normed": True}, None, {"wild": "long"})
for _wild in ("state", "values", "parallel", "long"):
    VECTOR[f"kda fp16 {_wild}"] = ({**LARGE, "normed": True, "sequences": 2}, None, {"wild": _wild})
VECTOR["kda fp16 lengths"] = ({**LARGE, "sequences": 2}, None, {"wild": "lengths"})


def vector_case(name: str) -> bool:
    settings, lower, changes = VECTOR[name]
    x = wide_reference.make_inputs(**{"dtype": BF, "device": "cuda", **settings})
    make_wild(x, changes.get("wild"))
    norm, cu, sigmoid = not settings.get("normed", False), changes.get("cu"), changes.get("sigmoid", 0.0)
    v_first = settings.get("v_first", False)
    wide = {n: t.double() for n, t in x.items()}
    want, state = wide_reference.recurrence(
        **wide, norm=norm, raw=lower is not None, lower=lower, sigmoid=sigmoid, v_first=v_first, cu=cu
    )
    switches = scalar.Switches(norm=norm, sigmoid=sigmoid > 0, negative=sigmoid == 2.0, gate=lower is not None)
    cut = None if cu is None else torch.tensor(cu, device="cuda")
    run = lambda: vector.forward(
        x["q"], x["k"], x["v"], x["g"], x["beta"], None, x.get("initial_state"), True, v_first, cut,
        x.get("A_log"), x.get("dt_bias"), lower, switches,
    )  # fmt: skip
    return judge(name, run, want, state)


def judge(name: str, run, want, state) -> bool:
    o, final = run()
    again, _ = run()
    # What the dtype of o cannot hold is infinite there.
    held = want.abs() < torch.finfo(o.dtype).max
    errors = {"o": ratio(torch.where(held, o, 0), torch.where(held, want, 0)), "state": ratio(final, state)}
    good = all(e < 5e-3 for e in errors.values()) and torch.equal(o, again)
    print("ok " if good else "BAD", name, {n: f"{e:.1e}" for n, e in errors.items()}, flush=True)
    return good


def case(name: str) -> bool:
    if name in VECTOR:
        return vector_case(name)
    settings, changes = CASES[name]
    settings = {"dtype": BF, "device": "cuda", **settings}
    x = make_inputs(**settings)
    make_wild(x, changes.get("wild"))
    norm, cu, sigmoid = settings.get("norm", True), changes.get("cu"), changes.get("sigmoid", 0.0)
    v_first = settings.get("v_first", False)
    wide = {n: t.double() for n, t in x.items()}
    want, state = recurrence(wide, norm=norm, sigmoid=sigmoid, v_first=v_first, cu=cu)
    switches = scalar.Switches(norm=norm, sigmoid=sigmoid > 0, negative=sigmoid == 2.0, gate="A_log" in x)
    cut = None if cu is None else torch.tensor(cu, device="cuda")
    run = lambda: scalar.forward(
        x["q"], x["k"], x["v"], x.get("g"), x["beta"], None, x.get("initial_state"), True, v_first, cut,
        x.get("A_log"), x.get("dt_bias"), switches,
    )  # fmt: skip
    return judge(name, run, want, state)


def whole(shape: str, block: int, kda: bool, fit: int = 3) -> None:
    vector.FIT = fit
    B, T, H, D = SHAPES[shape]
    scalar.choose_block = vector.choose_block = lambda *a: block
    if kda:
        x = wide_reference.make_inputs(B, T, H, None, D, dtype=BF, device="cuda", **RAW)
    else:
        x = make_inputs(B, T, H, None, D, dtype=BF, device="cuda")
    given = (*(x[n] for n in ("q", "k", "v", "g", "beta")), None, None, False, False, None)
    if kda:
        ends = (x["A_log"], x["dt_bias"], -5.0, scalar.Switches(norm=True, sigmoid=True, gate=True))
        run = lambda: vector.forward(*given, *ends)
    else:
        run = lambda: scalar.forward(*given, None, None, scalar.Switches(norm=True))
    began = time.time()
    run()
    torch.cuda.synchronize()
    first = time.time() - began
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(5):
            run()
        torch.cuda.synchronize()
    parts = {e.key[:24]: round(e.device_time_total / 5e3, 4) for e in p.key_averages() if "delta" in e.key}
    began = time.perf_counter()
    for _ in range(20):
        run()
    host = (time.perf_counter() - began) / 20 * 1e6
    torch.cuda.synchronize()
    print(
        f"{shape} {'kda' if kda else 'gdn'} block {block} fit {fit}:"
        f" first {first:.1f} s, {median_ms(run):.4f} ms, host {host:.0f} us",
        parts,
        flush=True,
    )


def side_by_side(names: list[str]) -> int:
    """How many cases went wrong; what a process that dies leaves undone did, too."""
    parts = [part for i in range(WORKERS) if (part := names[i::WORKERS])]
    running = [
        subprocess.Popen([sys.executable, __file__, "some", *part], text=True, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT) for part in parts
    ]  # fmt: skip
    wrong = 0
    for part, process in zip(parts, running, strict=True):
        text = process.communicate()[0].strip().splitlines()
        said = [line for line in text if line[:4] in ("ok  ", "BAD ")]
        print(*said, sep="\n", flush=True)
        if len(said) < len(part):
            print(f"DIED {part[len(said)]}: " + " | ".join(text[-4:])[-700:], flush=True)
        wrong += len(part) - sum(line.startswith("ok") for line in said)
    return wrong


def main() -> None:
    what = sys.argv[1]
    if what == "check":
        names = sys.argv[2:] or [*CASES, *VECTOR]
        if len(names) > 1:
            sys.exit(side_by_side(names))
        sys.exit(not case(names[0]))
    if what == "some":
        sys.exit(sum(not case(name) for name in sys.argv[2:]))
    print(torch.cuda.get_device_name(), torch.__version__)
    for shape in sys.argv[2:] or ("L", "M", "X"):
        for block in (128, 64):
            whole(shape, block, kda=False)
            for fit in (3, 2):
                whole(shape, block, True, fit)


if __name__ == "__main__":
    main()
