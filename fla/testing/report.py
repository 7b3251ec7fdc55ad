# SPDX-License-Identifier: MIT
"""The tally of a run: for the terminal, and as JSON."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_REASONS_SHOWN = 8


def row(
    backend: str,
    function: str,
    case: str,
    device: str,
    outcome: str,
    reason: str = "",
    calls: int = 0,
    stated: Any = None,
) -> Row:
    """One case's outcome: ``ran``, ``refused``, ``failed`` or ``skipped``.

    ``stated`` are tolerances of the backend's own by dtype.
    """
    return {
        "backend": backend,
        "function": function,
        "case": case,
        "device": device,
        "outcome": outcome,
        "reason": reason,
        "calls": calls,
        "stated_tolerances": stated or {},
    }


def _counts(rows: Iterable[Row]) -> dict[str, int]:
    rows = list(rows)
    counted = Counter(r["outcome"] for r in rows)
    counts = {name: counted[name] for name in ("ran", "refused", "failed", "skipped")}
    return {**counts, "calls": sum(r["calls"] for r in rows)}


def _grouped(rows: Sequence[Row], *keys: str) -> dict[tuple[str, ...], list[Row]]:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for r in rows:
        groups.setdefault(tuple(r[key] for key in keys), []).append(r)
    return groups


def _text(counts: dict[str, int]) -> str:
    return (
        f"{counts['ran']} cases ran in the backend ({counts['calls']} calls), {counts['refused']} refused as declared, "
        f"{counts['failed']} failed, {counts['skipped']} skipped"
    )


def summary(rows: Sequence[Row], *, verbose: bool = False) -> list[str]:
    """Lines for the terminal; with ``verbose`` also why calls were refused."""
    lines = []
    for (backend,), mine in _grouped(rows, "backend").items():
        lines.append(f"{backend}: {_text(_counts(mine))}")
        for (function, device), part in _grouped(mine, "function", "device").items():
            lines.append(f"  {function} on {device}: {_text(_counts(part))}")
        for dtype, limits in mine[0]["stated_tolerances"].items():
            lines.append(f"  states its own accuracy for {dtype}: results within {limits[0]}, gradients {limits[1]}")
        for (reason,), part in _grouped([r for r in mine if r["outcome"] == "skipped"], "reason").items():
            lines.append(f"  skipped {len(part)}x: {reason}")
        refused = _grouped([r for r in mine if r["outcome"] == "refused"], "reason")
        most = sorted(refused.items(), key=lambda item: -len(item[1]))
        for (reason,), part in most[: None if verbose else _REASONS_SHOWN]:
            lines.append(f"  refused {len(part)}x: {reason}")
    return lines


def write(path: str, rows: Sequence[Row]) -> None:
    """The JSON report: versions, counts by backend and function, every case."""
    backends = {}
    for (backend,), mine in _grouped(rows, "backend").items():
        functions = {function: _counts(part) for (function,), part in _grouped(mine, "function").items()}
        backends[backend] = {**_counts(mine), "functions": functions}
    document = {"versions": _versions(), "backends": backends, "cases": list(rows)}
    Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _versions() -> dict[str, Any]:
    import torch

    import fla

    found: dict[str, Any] = {"python": platform.python_version(), "fla": fla.__version__, "torch": torch.__version__}
    if torch.cuda.is_available():
        found["cuda_devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return found
