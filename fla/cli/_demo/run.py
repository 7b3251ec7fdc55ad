# SPDX-License-Identifier: MIT
"""The course of one demo run, from text to the table of backends."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from pathlib import Path
from typing import Any, TextIO

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import fla
from fla.backends import Trace, trace
from fla.cli._demo.corpus import Bytes, Corpus, load_corpus
from fla.cli._demo.ngram import BIGRAM, ORDER_3, NgramModel
from fla.cli._demo.progress import progress
from fla.cli._demo.report import draw_curve, thinned, write_metrics
from fla.cli._demo.speak import Speech, speak
from fla.cli._demo.train import Curve, Interrupt, Recipe, bits_per_byte, build_model, held_out_windows, train
from fla.cli._devices import usable_device
from fla.cli._output import CliError, Output
from fla.models._index import FAMILIES

RECIPES = {
    "small": Recipe(),
    "tiny": Recipe(hidden_size=32, layers=1, heads=1, head_dim=16, batch=4, length=64),
}
_EVALUATION_LENGTH = 1024
_EVALUATION_BYTES = 1 << 17


def run_demo(args: argparse.Namespace, stream: TextIO) -> dict[str, Any]:
    """Run the demo; text for people goes to `stream`, files to `args.out`. Returns what `metrics.json` holds."""
    out = Output(stream)
    _quieten_transformers()
    device = usable_device(args.device)
    folder = _folder(args.out)
    corpus = load_corpus(args.text)
    recipe = RECIPES[args.size]
    if len(corpus.train) <= recipe.length or len(corpus.held_out) < 2:
        raise CliError(f"too little text under {corpus.root}: {len(corpus.train)} bytes to train on")
    out.line(
        f"Text: {corpus.train_files} files ({len(corpus.train) / 1e6:.1f} MB) to train on, "
        f"{corpus.held_out_files} files ({len(corpus.held_out) / 1e6:.1f} MB) held out, from {corpus.root}"
    )
    family = next(f for f in FAMILIES if f.model_type == args.family)
    model = build_model(family, recipe, device, args.seed)
    parameters = sum(p.numel() for p in model.parameters())
    out.line(f"Model: {family.stem}, {recipe.layers} layers, {parameters / 1e6:.2f} M parameters, on {device}")

    interrupt = Interrupt()
    metrics = _facts(args, corpus, recipe, device, parameters)
    with interrupt.listening(), trace() as calls:
        with progress(out, args.seconds) as on_step:
            curve = train(
                model, corpus.train, recipe, seconds=args.seconds, seed=args.seed, interrupt=interrupt, on_step=on_step
            )
        model.save_pretrained(folder / "checkpoint")
        metrics["training"] = {
            "seconds": curve.seconds[-1] if curve.seconds else 0.0,
            "steps": len(curve.seconds),
            "bytes": curve.bytes_seen,
            "bytes_per_second": curve.bytes_per_second,
            "curve": thinned(curve),
        }
        if not interrupt.asked:
            metrics["held_out"] = _held_out(out, model, corpus)
        if not interrupt.asked and args.tokens:
            metrics["generation"] = _talk(out, stream, folder / "checkpoint", device, args, interrupt)
    metrics["interrupted"] = interrupt.asked
    metrics["ops"] = _ops(calls)
    _show_ops(out, metrics["ops"])
    _save(out, folder, metrics, curve)
    if interrupt.asked:
        out.line("Interrupted: what existed was saved.")
    return metrics


def _quieten_transformers() -> None:
    """Its progress bars and reminders would run across the demo's own text."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CliError(f"--out {path} cannot be created: {error.strerror}") from None
    return path


def _facts(
    args: argparse.Namespace, corpus: Corpus, recipe: Recipe, device: torch.device, parameters: int
) -> dict[str, Any]:
    return {
        "fla": fla.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "seed": args.seed,
        "family": args.family,
        "size": args.size,
        "parameters": parameters,
        "recipe": vars(recipe),
        "text": {
            "root": str(corpus.root),
            "train_bytes": len(corpus.train),
            "held_out_bytes": len(corpus.held_out),
        },
        "training": None,
        "held_out": None,
        "generation": None,
        "ops": [],
        "interrupted": False,
    }


def _held_out(out: Output, model: Any, corpus: Corpus) -> dict[str, Any]:
    """Bits per byte of the model and of two counted models, all on the same held-out bytes."""
    windows = held_out_windows(corpus.held_out, _EVALUATION_LENGTH, _EVALUATION_BYTES)
    result: dict[str, Any] = {
        "bytes": int(windows[:, 1:].size),
        "model": bits_per_byte(model, corpus.held_out, windows),
    }
    for name, order in (("bigram", BIGRAM), ("order_3", ORDER_3)):
        result[name] = _counted(corpus.train, corpus.held_out, order, windows)
    out.heading(f"Bits per byte on {result['bytes']:,} held-out bytes (fewer is better)")
    out.table(
        ["predictor", "bits/byte"],
        [
            ["this model", f"{result['model']:.3f}"],
            ["byte bigram, counted", f"{result['bigram']:.3f}"],
            ["order-3 bytes, counted", f"{result['order_3']:.3f}"],
        ],
    )
    return result


def _counted(train_data: Bytes, held_out: Bytes, order: int, windows: Any) -> float:
    import numpy as np

    # A byte without a full context (the first few of the held-out text) is left out of the mean.
    bits = -np.log2(NgramModel(train_data, order).probabilities(held_out))
    at = windows[:, 1:].flatten() - order
    return float(bits[at[at >= 0]].mean())


def _talk(
    out: Output, stream: TextIO, checkpoint: Path, device: torch.device, args: argparse.Namespace, interrupt: Interrupt
) -> dict[str, Any]:
    """Reload the checkpoint, as a user would, and stream text from it."""
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    model.to(device)

    def write(text: str) -> None:
        stream.write(text)
        stream.flush()

    out.heading("The reloaded checkpoint continues the prompt")
    speech: Speech = speak(
        model,
        args.prompt,
        tokens=args.tokens,
        seed=args.seed,
        temperature=args.temperature,
        write=write,
        should_stop=lambda: interrupt.asked,
    )
    out.line()
    out.line(f"  [{speech.tokens} bytes in {speech.seconds:.1f} s: {speech.tokens_per_second:.0f} tokens/s]")
    return {
        "prompt": speech.prompt,
        "text": speech.text,
        "tokens": speech.tokens,
        "seconds": speech.seconds,
        "tokens_per_second": speech.tokens_per_second,
    }


def _ops(calls: Trace) -> list[dict[str, Any]]:
    """Op, backend and number of calls of everything that was dispatched, most calls first."""
    return [
        {"op": f"{operation}.{function}", "backend": backend or "(raised)", "calls": count}
        for (operation, function, backend), count in calls.counts().most_common()
    ]


def _show_ops(out: Output, ops: list[dict[str, Any]]) -> None:
    out.heading("Which backend computed what")
    out.table(["op", "backend", "calls"], [[row["op"], row["backend"], f"{row['calls']:,}"] for row in ops])


def _save(out: Output, folder: Path, metrics: dict[str, Any], curve: Curve) -> None:
    held_out = metrics["held_out"] or {}
    baselines = {name: held_out[key] for name, key in (("bigram", "bigram"), ("order 3", "order_3")) if key in held_out}
    written = ["checkpoint/", "metrics.json"]
    write_metrics(folder / "metrics.json", metrics)
    if curve.seconds and draw_curve(folder / "loss.png", curve, baselines, held_out.get("model")):
        written.append("loss.png")
    elif curve.seconds:
        print("no loss.png: matplotlib is not installed", file=sys.stderr)
    out.line(f"\nWritten to {folder}/: {', '.join(written)}")
