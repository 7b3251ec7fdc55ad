# SPDX-License-Identifier: MIT
"""Training and decoding speed of whole models of about 340M parameters, ours and, beside them, the reference package's.

    python benchmarks/models/throughput.py --reference /path/with/fla-0.6.0
    python benchmarks/models/throughput.py --models KDA --modes train --device cpu --tiny

Only names that both packages have are used. Every model of every package runs in a process of its own, on random tokens
and weights: one training step from an empty kernel cache (``first``), training steps (``train``: bf16, fused AdamW,
the largest batch of a list that fits) and greedy decoding at batch 1 and 64 (``decode``). A loss or logits that are not
finite end the run with exit status 1. ``decode`` also times our StaticDecode, a CUDA graph, where the package has it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parents[2]
COMMON = {"hidden_size": 1024, "num_hidden_layers": 24, "vocab_size": 32000}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "KDA": ("KDA", {"num_heads": 8, "head_dim": 128}),
    "GDN": ("GatedDeltaNet", {"num_heads": 6, "head_dim": 128, "expand_v": 2}),
    "GLA": ("GLA", {"num_heads": 4}),
}
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, "num_heads": 2}
MODES = ("first", "train", "decode")


def build(name: str, device: str, tiny: bool) -> Any:
    import torch

    from fla import models

    stem, sizes = MODELS[name]
    sizes = {**COMMON, **sizes, **(TINY if tiny else {})}
    if tiny and "head_dim" in sizes:
        sizes["head_dim"] = 16
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(models, f"{stem}ForCausalLM")(getattr(models, f"{stem}Config")(**sizes))
    return model.to(torch.bfloat16)


class Clock:
    """Seconds of what runs inside, the device's work included."""

    def __init__(self, device: str) -> None:
        import torch

        self.wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def __enter__(self) -> Clock:
        self.wait()
        self.start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()
        self.seconds = time.perf_counter() - self.start


def finite(tensor: Any, what: str) -> None:
    if not bool(tensor.isfinite().all()):
        raise SystemExit(f"{what} is not finite")


class Trainer:
    """Steps of AdamW on one batch of random tokens."""

    def __init__(self, args: argparse.Namespace, name: str, batch: int) -> None:
        import torch

        self.model = build(name, args.device, args.tiny).train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=args.device == "cuda"
        )
        self.tokens = torch.randint(3, self.model.config.vocab_size, (batch, args.length), device=args.device)

    def step(self) -> Any:
        loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def measure_first(args: argparse.Namespace, name: str) -> Iterator[dict[str, Any]]:
    """The first step of a process; the parent sees to an empty kernel cache."""
    trainer = Trainer(args, name, 1)
    with Clock(args.device) as clock:
        finite(trainer.step(), "loss")
    with Clock(args.device) as second:
        finite(trainer.step(), "loss")
    yield {"batch": 1, "seconds": clock.seconds, "second_step": second.seconds}


def measure_train(args: argparse.Namespace, name: str) -> Iterator[dict[str, Any]]:
    """Tokens per second at the largest batch that fits."""
    import torch

    for batch in sorted(args.batches, reverse=True):
        trainer = None
        try:
            if args.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            trainer = Trainer(args, name, batch)
            for _ in range(args.warmup):
                trainer.step()
            with Clock(args.device) as clock:
                losses = [trainer.step() for _ in range(args.steps)]
            finite(torch.stack(losses), "loss")
        except torch.OutOfMemoryError:
            trainer = None
            gc.collect()
            torch.cuda.empty_cache()
            continue
        memory = torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else 0.0
        parameters = sum(p.numel() for p in trainer.model.parameters())
        yield {
            "batch": batch,
            "tokens_per_second": batch * args.length * args.steps / clock.seconds,
            "ms_per_step": clock.seconds / args.steps * 1e3,
            "peak_gib": memory,
            "loss": float(losses[-1]),
            "parameters": parameters,
        }
        return
    raise SystemExit(f"no batch of {args.batches} fits")


def measure_decode(args: argparse.Namespace, name: str) -> Iterator[dict[str, Any]]:
    """Tokens per second of greedy decoding after a prompt, step by step and, where there is one, as a graph."""
    import torch

    model = build(name, args.device, args.tiny).eval()
    try:
        from fla.decoding import StaticDecode
    except ImportError:
        StaticDecode = None  # type: ignore[assignment,misc]
    for batch in args.decode_batches:
        prompt = torch.randint(3, model.config.vocab_size, (batch, args.prompt), device=args.device)
        with torch.no_grad():
            out = model(input_ids=prompt, use_cache=True)
            cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)

            def step(token: Any, cache: Any = cache) -> Any:
                return model(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1:]

            ways = {"step": step}
            if StaticDecode is not None and args.device == "cuda":
                static = StaticDecode(model, cache)
                ways["graph"] = lambda token, static=static: static.step(token)[:, None]
            for way, take in ways.items():
                for _ in range(args.warmup + 2):
                    logits = take(token)
                with Clock(args.device) as clock:
                    for _ in range(args.decode_steps):
                        logits = take(token)
                        token = logits.argmax(-1)
                finite(logits, "logits")
                seconds = clock.seconds / args.decode_steps
                yield {"batch": batch, "way": way, "tokens_per_second": batch / seconds, "ms_per_step": seconds * 1e3}


def child(args: argparse.Namespace) -> None:
    """Measure in this process and print a line of JSON for each row."""
    import fla

    if not Path(fla.__file__).resolve().is_relative_to(Path(args.child).resolve()):
        raise SystemExit(f"fla is not in {args.child}, it would be taken from {Path(fla.__file__).parent}")
    measure = {"first": measure_first, "train": measure_train, "decode": measure_decode}
    for name in args.models:
        for mode in args.modes:
            for row in measure[mode](args, name):
                print("ROW " + json.dumps({"model": name, "mode": mode, **row}), flush=True)
            gc.collect()


def run(args: argparse.Namespace, package: str, models: list[str], modes: list[str]) -> list[dict[str, Any]]:
    """The rows of a child with ``package`` in front of the path."""
    path = [
        package,
        *(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and Path(p).resolve() != HOME),
    ]
    with tempfile.TemporaryDirectory() as empty:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        if modes == ["first"]:
            env["TRITON_CACHE_DIR"] = empty
        command = [sys.executable, __file__, "--child", package, "--models", *models, "--modes", *modes]
        for option in ("device", "length", "steps", "warmup", "prompt", "decode_steps"):
            command += [f"--{option.replace('_', '-')}", str(getattr(args, option))]
        for option in ("batches", "decode_batches"):
            command += [f"--{option.replace('_', '-')}", *map(str, getattr(args, option))]
        command += ["--tiny"] * args.tiny
        try:
            done = subprocess.run(
                command, env=env, capture_output=True, text=True, timeout=args.timeout, check=False, cwd=empty
            )
            out, err, code = done.stdout, done.stderr, done.returncode
        except subprocess.TimeoutExpired as late:
            out, err, code = _text(late.stdout), f"no end after {args.timeout} s", 1
    rows = [json.loads(line[4:]) for line in out.splitlines() if line.startswith("ROW ")]
    if code:
        last = err.strip().splitlines()[-1:] or ["?"]
        rows.append({"model": "+".join(models), "mode": "+".join(modes), "error": last[0]})
    return rows


def _text(output: Any) -> str:
    return output.decode() if isinstance(output, bytes) else output or ""


def show(package: str, row: dict[str, Any]) -> str:
    facts = {name: value for name, value in row.items() if name not in ("model", "mode")}
    text = "  ".join(f"{k} {v:,.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in facts.items())
    return f"{package:10s} {row['model']:4s} {row['mode']:6s} {text}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--reference", help="folder with the reference package, run after ours with the same options")
    parser.add_argument("--only-reference", action="store_true", help="do not run ours")
    parser.add_argument("--together", action="store_true", help="one process for all models and modes of a package")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="sizes for a test of this script")
    parser.add_argument("--batches", nargs="+", type=int, default=[32, 16, 8, 4, 2, 1], help="tried from the largest")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--decode-batches", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--decode-steps", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one process")
    parser.add_argument("--json", help="write all rows here")
    parser.add_argument("--child", metavar="PACKAGE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return 0
    packages = {} if args.only_reference else {"ours": str(HOME)}
    if args.reference:
        packages["reference"] = args.reference
    table: list[dict[str, Any]] = []
    for package, where in packages.items():
        jobs = [(args.models, args.modes)] if args.together else [([n], [m]) for n in args.models for m in args.modes]
        for models, modes in jobs:
            for row in run(args, where, models, modes):
                table.append({"package": package, **row})
                print(show(package, row), flush=True)
    for mine, other in ((a, b) for a in table for b in table if (a["package"], b["package"]) == ("ours", "reference")):
        key, unit = ("model", "mode", "batch"), "tokens_per_second"
        if unit in mine and unit in other and all(mine[k] == other[k] for k in key):
            way = f" ({mine['way']})" if "way" in mine else ""
            print(f"{mine['model']} {mine['mode']} B{mine['batch']}{way}: {mine[unit] / other[unit]:.2f}x", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(table, indent=1))
    return int(any("error" in row for row in table))


if __name__ == "__main__":
    sys.exit(main())
