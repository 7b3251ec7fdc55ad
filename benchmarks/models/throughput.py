# SPDX-License-Identifier: MIT
"""Training and decoding speed of whole models of about 340M parameters, ours and, beside them, the reference package's.

    python benchmarks/models/throughput.py --reference /path/with/fla-0.6.0
    python benchmarks/models/throughput.py --models KDA --modes train --device cpu --tiny

Only names that both packages have are used, on random tokens and weights. A process for each package stays alive for
the whole run and they take turns, so that a model of one is measured right before that of the other:

* ``first``: one training step with an empty kernel cache, in a process of its own;
* ``train``: training steps: bf16, fused AdamW, the largest batch of a list that fits;
* ``decode``: greedy decoding at batch 1 and 64: ``generate`` as a user calls it (``generate``), the forward pass alone
  (``step``) and, where the package has them, their forms with a CUDA graph (``generate graph``, ``graph``).

A loss or logits that are not finite, or a measurement that fails, end the run with exit status 1.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parents[2]
COMMON = {"hidden_size": 1024, "vocab_size": 32000}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "KDA": ("KDA", {"num_heads": 8, "head_dim": 128}),
    # The gate bounded as Kimi Linear recommends, which takes faster kernels.
    "KDA-5": ("KDA", {"num_heads": 8, "head_dim": 128, "safe_gate": True, "lower_bound": -5.0}),
    "GDN": ("GatedDeltaNet", {"num_heads": 6, "head_dim": 128, "expand_v": 2}),
    "GLA": ("GLA", {"num_heads": 4}),
}
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, "num_heads": 2}
MODES = ("first", "train", "decode")


def build(args: argparse.Namespace, name: str) -> Any:
    import torch

    from fla import models

    stem, sizes = MODELS[name]
    sizes = {**COMMON, "num_hidden_layers": args.layers, **sizes, **(TINY if args.tiny else {})}
    if args.tiny and "head_dim" in sizes:
        sizes["head_dim"] = 16
    torch.manual_seed(0)
    with torch.device(args.device):
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

        self.model = build(args, name).train()
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
        row = _train(args, name, batch)
        gc.collect()
        if row is not None:
            yield row
            return
        torch.cuda.empty_cache()
    raise SystemExit(f"no batch of {args.batches} fits")


def _train(args: argparse.Namespace, name: str, batch: int) -> dict[str, Any] | None:
    import torch

    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        trainer = Trainer(args, name, batch)
        for _ in range(args.warmup):
            trainer.step()
        with Clock(args.device) as clock:
            losses = [trainer.step() for _ in range(args.steps)]
    except torch.OutOfMemoryError:
        return None
    finite(torch.stack(losses), "loss")
    kernels = []
    if args.profile:
        try:
            kernels = _kernels(trainer, args.profile)
        except (AssertionError, RuntimeError) as error:  # the figures are worth more than the list
            kernels = [f"no profile: {error}"]
    return {
        **({"kernels": kernels} if kernels else {}),
        "batch": batch,
        "tokens_per_second": batch * args.length * args.steps / clock.seconds,
        "ms_per_step": clock.seconds / args.steps * 1e3,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else 0.0,
        "loss": float(losses[-1]),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
    }


def _kernels(trainer: Trainer, count: int) -> list[str]:
    """The ``count`` kernels that take the most of a step: milliseconds, launches, name."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        trainer.step()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            row = found.setdefault(event.name, [0.0, 0])
            row[0] += event.device_time / 1e3
            row[1] += 1
    rows = sorted(found.items(), key=lambda item: -item[1][0])
    total = sum(time for time, _ in found.values())
    return [
        f"{total:.1f} ms in {sum(n for _, n in found.values()):.0f} kernels",
        *(f"{time:.2f} x{n:.0f} {name[:70]}" for name, (time, n) in rows[:count]),
    ]


def measure_decode(args: argparse.Namespace, name: str) -> Iterator[dict[str, Any]]:
    """Tokens per second of greedy decoding after a prompt."""
    import torch

    model = build(args, name).eval()
    # Random weights may ask for the end at any time.
    model.generation_config.eos_token_id = None
    for batch in args.decode_batches:
        prompt = torch.randint(3, model.config.vocab_size, (batch, args.prompt), device=args.device)
        for way, count, seconds in _ways(args, model, prompt):
            yield {
                "batch": batch,
                "way": way,
                "tokens_per_second": batch * count / seconds,
                "ms_per_step": seconds / count * 1e3,
            }


def _ways(args: argparse.Namespace, model: Any, prompt: Any) -> Iterator[tuple[str, int, float]]:
    """Names of ways to decode, steps taken and their seconds."""
    import torch

    try:
        from fla.decoding import StaticDecode
    except ImportError:
        StaticDecode = None  # type: ignore[assignment,misc]
    graphs = StaticDecode is not None and (args.device == "cuda" or args.tiny)

    def generate(tokens: int, **kwargs: Any) -> float:
        with Clock(args.device) as clock:
            out = model.generate(prompt, max_new_tokens=tokens, do_sample=False, **kwargs)
        if out.shape[1] != prompt.shape[1] + tokens:
            raise RuntimeError(f"generate returned {out.shape[1] - prompt.shape[1]} tokens, {tokens} were asked for")
        return clock.seconds

    options = {"generate": {}, **({"generate graph": {"cache_implementation": "static"}} if graphs else {})}
    for way, kwargs in options.items():
        for _ in range(args.warmup):
            generate(4, **kwargs)
        # Less a run of 2 tokens: the prompt, and what is captured once. Steps are added until they outweigh that run.
        steps = args.decode_steps
        for _ in range(4):
            runs = [(generate(2, **kwargs), generate(steps + 2, **kwargs)) for _ in range(3)]
            short, rest = statistics.median(s for s, _ in runs), statistics.median(l - s for s, l in runs)
            if rest > short / 4:
                break
            steps *= 4
        else:
            raise RuntimeError(f"{way}: {steps // 4} more tokens took {rest:.4f} s more than 2 did ({short:.4f} s)")
        yield way, steps, rest

    with torch.no_grad():
        out = model(input_ids=prompt, use_cache=True)
        cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)

        def step(token: Any) -> Any:
            return model(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1:]

        ways = {"step": step}
        if graphs:
            static = StaticDecode(model, cache)
            ways["graph"] = lambda token: static.step(token)[:, None]
        for way, take in ways.items():
            for _ in range(args.warmup + 2):
                logits = take(token)
            with Clock(args.device) as clock:
                for _ in range(args.decode_steps):
                    logits = take(token)
                    token = logits.argmax(-1)
            finite(logits, "logits")
            yield way, args.decode_steps, clock.seconds


MEASURES = {"first": measure_first, "train": measure_train, "decode": measure_decode}


def child(args: argparse.Namespace) -> None:
    """Measure what lines of standard input ask for; print a line of JSON for each row, and DONE."""
    import fla

    if not Path(fla.__file__).resolve().is_relative_to(Path(args.child).resolve()):
        raise SystemExit(f"fla is not in {args.child}, it would be taken from {Path(fla.__file__).parent}")
    import torch

    from fla import models  # noqa: F401

    if args.tuning_ms:
        _tune_for(args.tuning_ms, args.compile_threads)
    print("READY", flush=True)
    for line in sys.stdin:
        name, mode = line.split()
        try:
            for row in MEASURES[mode](args, name):
                print("ROW " + json.dumps(row), flush=True)
        except (Exception, SystemExit) as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            print("ROW " + json.dumps({"error": text[:300]}), flush=True)
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
        print("DONE", flush=True)


def _tune_for(milliseconds: int, threads: int) -> None:
    """Let Triton's autotuner time a configuration that long instead of 100 ms, and compile configurations together."""
    import triton
    from triton.runtime._async_compile import AsyncCompileMode
    from triton.runtime.autotuner import Autotuner

    driver = triton.runtime.driver.active
    quick = functools.partial(driver.get_benchmarker(), warmup=milliseconds // 4, rep=milliseconds)
    driver.get_benchmarker = lambda: quick
    prune, pool = Autotuner.prune_configs, ThreadPoolExecutor(max(threads, 1))

    def compile_first(self: Any, kwargs: dict[str, Any]) -> Any:
        configs = prune(self, kwargs)
        with AsyncCompileMode(pool, ignore_errors=True):
            for config in configs:
                self.fn.run(*self.nargs.values(), **{**kwargs, **config.all_kwargs(), "warmup": True})
        return configs

    if threads:
        Autotuner.prune_configs = compile_first


class Worker:
    """A child process and the lines it prints."""

    def __init__(self, args: argparse.Namespace, package: str, cache: str | None = None) -> None:
        kept = (p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and Path(p).resolve() != HOME)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([package, *kept])}
        package = package.split(os.pathsep)[0]
        if cache is not None:
            env["TRITON_CACHE_DIR"] = cache
        command = [sys.executable, __file__, "--child", package]
        for option in (
            "device",
            "length",
            "steps",
            "warmup",
            "prompt",
            "decode_steps",
            "layers",
            "tuning_ms",
            "compile_threads",
            "profile",
        ):
            command += [f"--{option.replace('_', '-')}", str(getattr(args, option))]
        for option in ("batches", "decode_batches"):
            command += [f"--{option.replace('_', '-')}", *map(str, getattr(args, option))]
        command += ["--tiny"] * args.tiny
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
            cwd=tempfile.gettempdir(),
        )  # fmt: skip
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line.strip())
        self.lines.put(None)

    def ask(self, name: str, mode: str, timeout: float) -> Iterator[dict[str, Any]]:
        """The rows of one measurement."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{name} {mode}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        end = time.monotonic() + timeout
        while True:
            try:
                line = self.lines.get(timeout=max(end - time.monotonic(), 0.01))
            except queue.Empty:
                self.process.kill()
                yield {"error": f"no end after {timeout} s"}
                return
            if line is None:
                self.errors.seek(0)
                yield {"error": (self.errors.read().strip().splitlines() or ["?"])[-1]}
                return
            if line == "DONE":
                return
            if line.startswith("ROW "):
                yield json.loads(line[4:])

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            self.process.wait(30)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        self.errors.close()


def measure(args: argparse.Namespace, packages: dict[str, str]) -> Iterator[dict[str, Any]]:
    """All rows."""
    workers: dict[str, Worker] = {}
    for mode in args.modes:
        if mode == "first":
            for name in args.models:
                for package, where in packages.items():
                    with tempfile.TemporaryDirectory() as empty:
                        worker = Worker(args, where, empty)
                        for row in worker.ask(name, mode, args.timeout):
                            yield {"package": package, "model": name, "mode": mode, **row}
                        worker.close()
            continue
        for package, where in packages.items():
            if package not in workers:
                workers[package] = Worker(args, where)
        for name in args.models:
            for package, where in packages.items():
                if workers[package].process.poll() is not None:
                    workers[package].close()
                    workers[package] = Worker(args, where)
                for row in workers[package].ask(name, mode, args.timeout):
                    yield {"package": package, "model": name, "mode": mode, **row}
    for worker in workers.values():
        worker.close()


def show(row: dict[str, Any]) -> str:
    facts = {name: value for name, value in row.items() if name not in ("package", "model", "mode")}
    kernels = "".join(f"\n    {line}" for line in facts.pop("kernels", []))
    text = "  ".join(f"{k} {v:,.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in facts.items())
    return f"{row['package']:10s} {row['model']:5s} {row['mode']:6s} {text}{kernels}"


def ratios(table: list[dict[str, Any]]) -> Iterator[str]:
    """Ours over the reference: the same way, and for our graphs the reference's way without one."""
    unit = "tokens_per_second"
    pairs = ((a, b) for a in table for b in table if (a["package"], b["package"]) == ("ours", "reference"))
    for mine, other in pairs:
        if unit not in mine or unit not in other or any(mine[k] != other[k] for k in ("model", "mode")):
            continue
        way, plain = mine.get("way"), {"generate graph": "generate", "graph": "step"}
        if plain.get(str(way), way) != other.get("way") or (way is not None and mine["batch"] != other["batch"]):
            continue
        batch = mine["batch"] if mine["batch"] == other["batch"] else f"{mine['batch']} and {other['batch']}"
        yield f"{mine['model']} {mine['mode']} B{batch}{f' ({way})' if way else ''}: {mine[unit] / other[unit]:.2f}x"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument(
        "--reference",
        help="folder with the reference package, measured in turn with ours (and what it needs, PATH:PATH)",
    )
    parser.add_argument("--only-reference", action="store_true", help="do not run ours")
    parser.add_argument("--tuning-ms", type=int, default=0, help="let Triton's autotuner time a configuration so long")
    parser.add_argument("--compile-threads", type=int, default=0, help="compile an autotuner's configurations together")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="list the kernels that take most of a step")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="sizes for a test of this script")
    parser.add_argument("--batches", nargs="+", type=int, default=[32, 16, 8, 4, 2, 1], help="tried from the largest")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--decode-batches", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--decode-steps", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one measurement")
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
    for row in measure(args, packages):
        table.append(row)
        print(show(row), flush=True)
        if args.json:
            Path(args.json).write_text(json.dumps(table, indent=1))
    for line in ratios(table):
        print(line, flush=True)
    return int(any("error" in row for row in table))


if __name__ == "__main__":
    sys.exit(main())
