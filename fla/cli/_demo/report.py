# SPDX-License-Identifier: MIT
"""What a demo run leaves behind: `metrics.json` and the loss curve."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fla.cli._demo.train import Curve


def write_metrics(path: Path, metrics: dict[str, Any]) -> None:
    """Write the file whole or not at all: an interrupt must not leave half a document."""
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(metrics, indent=2, default=str) + "\n", encoding="utf-8")
    os.replace(draft, path)


def thinned(curve: Curve, points: int = 200) -> list[dict[str, float]]:
    """The loss curve with at most `points` entries, each the mean of the steps it stands for."""
    losses = curve.bits_per_byte
    stride = max(-(-len(losses) // points), 1)
    return [
        {
            "seconds": round(curve.seconds[min(i + stride, len(losses)) - 1], 3),
            "bits_per_byte": round(sum(losses[i : i + stride]) / len(losses[i : i + stride]), 4),
        }
        for i in range(0, len(losses), stride)
    ]


def draw_curve(path: Path, curve: Curve, baselines: dict[str, float], held_out: float | None) -> bool:
    """Draw the loss curve as a PNG; returns whether matplotlib was there to do it."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    points = thinned(curve)
    axes.plot([p["seconds"] for p in points], [p["bits_per_byte"] for p in points], label="training loss")
    for style, (name, value) in zip(("--", ":", "-."), baselines.items(), strict=False):
        axes.axhline(value, linestyle=style, color="grey", label=f"{name}, held out: {value:.2f}")
    if held_out is not None:
        axes.plot(curve.seconds[-1:], [held_out], "o", label=f"model, held out: {held_out:.2f}")
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("bits per byte")
    axes.set_ylim(0.0, 8.2)
    axes.legend()
    canvas.print_png(str(path))
    return True
