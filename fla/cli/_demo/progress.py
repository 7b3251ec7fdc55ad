# SPDX-License-Identifier: MIT
"""The training progress: a rich bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from fla.cli._demo.train import Curve
from fla.cli._output import Output

_LINE_EVERY = 10.0  # seconds


@contextlib.contextmanager
def progress(out: Output, seconds: float) -> Iterator[Callable[[Curve], None]]:
    """A function to call after every step with the curve so far."""
    if out.console is None:
        yield _lines(out, seconds)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("  training"),
        BarColumn(),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=out.console) as bar:
        task = bar.add_task("training", total=seconds, state="first step ...")

        def show(curve: Curve) -> None:
            bar.update(task, completed=min(curve.seconds[-1], seconds), state=describe(curve))

        yield show


def describe(curve: Curve) -> str:
    """Loss and speed so far."""
    return f"{curve.smoothed():5.3f} bits/byte  {curve.bytes_per_second / 1e3:6.1f} kB/s  step {len(curve.seconds)}"


def _lines(out: Output, seconds: float) -> Callable[[Curve], None]:
    due = 0.0

    def show(curve: Curve) -> None:
        nonlocal due
        now = curve.seconds[-1]
        if now >= due or now >= seconds:
            out.line(f"  {now:5.1f} s of {seconds:g}  {describe(curve)}")
            due = now + _LINE_EVERY

    return show
