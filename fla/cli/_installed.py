# SPDX-License-Identifier: MIT
"""What is installed: distributions, version conflicts, other copies of `fla`. Imports none of it."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

OURS = "flash-linear-attention"

# Shown by `fla doctor` when present; the first group also when absent.
NEEDED = ("torch", "transformers", "einops", "pluggy", "importlib-metadata", "packaging", "numpy")
KERNEL_COMPILERS = (
    "triton",
    "triton-windows",
    "triton-ascend",
    "triton-xpu",
    "pytorch-triton-rocm",
    "pytorch-triton-xpu",
)
OPTIONAL = (
    *("rich", "matplotlib", "torch_npu", "tilelang", "flash-kda", "tokenspeed-flashkda", "flash-qla", "flash-attn"),
    *("causal-conv1d", "nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12"),
)
# Ranges of the extras: pip cannot enforce them when torch was installed first from its own index.
_RANGES = {"torch": ">=2.7", "triton": ">=3.3,<3.10", "triton-windows": ">=3.3,<3.10", "transformers": ">=4.45,<6"}


def fold(name: str) -> str:
    """The one spelling pip uses for a distribution name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def distributions(path: list[str] | None = None) -> dict[str, list[metadata.Distribution]]:
    """Every installed distribution by folded name; more than one entry means installed in several places."""
    found: dict[str, list[metadata.Distribution]] = {}
    for dist in metadata.distributions(path=sys.path if path is None else path):
        name = dist.metadata["Name"] if dist.metadata else None
        if name:
            found.setdefault(fold(name), []).append(dist)
    return found


def versions(installed: dict[str, list[metadata.Distribution]]) -> list[dict[str, Any]]:
    """Name, version and allowed range of every distribution that matters here."""
    names = [*NEEDED, *(n for n in (*KERNEL_COMPILERS, *OPTIONAL) if fold(n) in installed)]
    plugins = sorted(n for n in installed if n.startswith("fla-backend-") and n not in names)
    rows = []
    for name in [OURS, *names, *plugins]:
        dists = installed.get(fold(name))
        version = dists[0].version if dists else None
        rows.append({"name": name, "version": version, "wanted": _RANGES.get(name), "ok": _in_range(name, version)})
    return rows


def _in_range(name: str, version: str | None) -> bool | None:
    if version is None or name not in _RANGES:
        return None
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:
        return None
    return SpecifierSet(_RANGES[name]).contains(version, prereleases=True)


def other_copies(installed: dict[str, list[metadata.Distribution]], ours: Path) -> list[dict[str, Any]]:
    """Distributions and folders that also provide the import name `fla`.

    Args:
        installed: from `distributions`.
        ours: the folder of the `fla` package that is running.
    """
    found: list[dict[str, Any]] = []
    for name in ("fla", "fla-core", OURS):
        for dist in installed.get(name, []):
            place = Path(str(dist.locate_file(""))).resolve()
            if name == OURS and _belongs_to(dist, place, ours):
                continue
            found.append({"distribution": dist.metadata["Name"], "version": dist.version, "location": str(place)})
    known = {entry["location"] for entry in found}
    for folder in _folders_on_path():
        if folder != ours and str(folder.parent) not in known:
            found.append({"distribution": None, "version": None, "location": str(folder.parent)})
    return found


def _belongs_to(dist: metadata.Distribution, place: Path, ours: Path) -> bool:
    """Whether this entry describes the running package: beside it, or an editable install of its folder."""
    if place == ours.parent:
        return True
    origin = dist.read_text("direct_url.json") or ""
    return '"editable": true' in origin and ours.parent.as_uri() in origin


def _folders_on_path() -> Iterator[Path]:
    seen = set()
    for entry in sys.path:
        folder = Path(entry or os.getcwd()) / "fla"
        if (folder / "__init__.py").is_file():
            folder = folder.resolve()
            if folder not in seen:
                seen.add(folder)
                yield folder


def conflicts(installed: dict[str, list[metadata.Distribution]], copies: Iterable[dict[str, Any]]) -> list[str]:
    """Sentences, each naming one thing that is installed wrongly and what to do about it."""
    found = []
    for copy in copies:
        what = f"{copy['distribution']} {copy['version']}" if copy["distribution"] else "another folder named fla"
        action = f"pip uninstall {copy['distribution']}" if copy["distribution"] else "remove it from sys.path"
        found.append(f"{what} in {copy['location']} also provides `fla`; which one is imported is luck: {action}")
    for row in versions(installed):
        if row["ok"] is False:
            found.append(f"{row['name']} {row['version']} is outside the supported range {row['wanted']}")
    for name, dists in installed.items():
        places = sorted({str(d.locate_file("")) for d in dists})
        if name in {fold(n) for n in (*NEEDED, *KERNEL_COMPILERS)} and len(places) > 1:
            found.append(f"{name} is installed {len(places)} times ({', '.join(places)}); the first one wins")
    compilers = [n for n in KERNEL_COMPILERS if fold(n) in installed]
    if len(compilers) > 1:
        found.append(f"{' and '.join(compilers)} are installed together and share one import name: keep one of them")
    found.extend(_pin_of_torch(installed))
    return found


def _pin_of_torch(installed: dict[str, list[metadata.Distribution]]) -> Iterator[str]:
    """A torch wheel built for one exact Triton beside another Triton."""
    if "torch" not in installed or "triton" not in installed:
        return
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return
    version = installed["triton"][0].version
    for text in installed["torch"][0].requires or ():
        need = Requirement(text)
        if fold(need.name) != "triton" or (need.marker is not None and not need.marker.evaluate({"extra": ""})):
            continue
        if not need.specifier.contains(version, prereleases=True):
            yield f"torch {installed['torch'][0].version} wants triton{need.specifier}, found {version}"


def has_program(name: str) -> bool:
    """Whether a program of this name is on PATH."""
    return shutil.which(name) is not None
