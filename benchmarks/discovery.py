# SPDX-License-Identifier: MIT
"""What discovery costs beside a bare ``importlib_metadata.entry_points(group=...)``, with 400 distributions installed.

The distributions are dist-info folders made for the occasion; one of them is a plugin, which discovery loads. Both
sides forget what they have cached before each round. Exits with 1 when the ratio is above 1.5.

    python benchmarks/discovery.py [--json] [--distributions 400]
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import importlib_metadata

from fla import backends
from fla.backends.discovery import DISCOVERY, GROUP

GOAL = 1.5

PLUGIN = """
from fla.backends import BaseBackend, hookimpl

class Toy(BaseBackend):
    backend_type = "bench_discovery"

@hookimpl
def register_backends(registry):
    registry.register("bench_discovery", Toy())
"""


def install(folder: Path, count: int) -> None:
    for i in range(count):
        info = folder / f"bench_dist_{i}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: bench-dist-{i}\nVersion: 1.0\n")
        # Half of what people install has entry points of some other group.
        if i % 2:
            (info / "entry_points.txt").write_text(f"[console_scripts]\nbench{i} = bench{i}:main\n")
    (folder / "bench_plugin.py").write_text(PLUGIN)
    (folder / "bench_dist_0-1.0.dist-info" / "entry_points.txt").write_text(f"[{GROUP}]\nbench = bench_plugin\n")


def bare() -> None:
    importlib.invalidate_caches()
    list(importlib_metadata.entry_points(group=GROUP))


def discover() -> None:
    sys.modules.pop("bench_plugin", None)
    DISCOVERY.refresh()


def seconds(work) -> float:  # type: ignore[no-untyped-def]
    began = time.thread_time()
    work()
    return time.thread_time() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--distributions", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        install(Path(folder), options.distributions)
        sys.path.insert(0, folder)
        # The first round of each imports what both need.
        bare()
        discover()
        plugin = next(row for row in backends.list_plugins() if row["name"] == "bench")
        assert plugin["ok"], plugin
        pairs = [(seconds(bare), seconds(discover)) for _ in range(options.rounds)]
    base = statistics.median(b for b, _ in pairs) * 1e3
    full = statistics.median(d for _, d in pairs) * 1e3
    ratio = statistics.median(d / b for b, d in pairs)
    missed = ratio > GOAL
    row = {"bare_ms": round(base, 2), "discovery_ms": round(full, 2), "ratio": round(ratio, 2), "goal": GOAL}
    if options.json:
        print(json.dumps({**row, "distributions": options.distributions, "missed": missed}))
    else:
        print(
            f"{options.distributions} distributions: entry_points {base:.2f} ms, discovery {full:.2f} ms, "
            f"{ratio:.2f}x (goal {GOAL}x) {'missed' if missed else 'ok'}"
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
