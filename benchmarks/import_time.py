# SPDX-License-Identifier: MIT
"""Start-up times: `import fla` beyond torch, and `fla --help`. Exits with 1 when one of them is over its limit.

Usage: python benchmarks/import_time.py [--runs 7] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version

IMPORT_LIMIT = 0.3  # seconds beyond `import torch`
HELP_LIMIT = 0.5  # seconds, from process start to exit

_IMPORT = """
import time, torch
before = set(__import__("sys").modules)
start = time.perf_counter()
import fla
took = time.perf_counter() - start
loaded = set(__import__("sys").modules) - before
print(took, len(loaded), *sorted({"triton", "transformers"} & {name.partition(".")[0] for name in loaded}))
"""


def import_times(runs: int) -> tuple[list[float], list[str]]:
    """Seconds of `import fla` after `import torch` in fresh processes, and which heavy packages it pulled in."""
    times, heavy = [], []
    for _ in range(runs):
        done = subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=True)
        took, _, *heavy = done.stdout.split()
        times.append(float(took))
    return times, heavy


def help_times(runs: int) -> list[float]:
    """Seconds of a whole `python -m fla --help`."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "fla", "--help"], capture_output=True, check=True)
        times.append(time.perf_counter() - start)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    imports, heavy = import_times(args.runs)
    helps = help_times(args.runs)
    rows = [
        {"what": "import fla beyond torch", "median_s": statistics.median(imports), "limit_s": IMPORT_LIMIT},
        {"what": "fla --help", "median_s": statistics.median(helps), "limit_s": HELP_LIMIT},
    ]
    ok = all(row["median_s"] < row["limit_s"] for row in rows) and not heavy
    if args.json:
        facts = {"python": platform.python_version(), "torch": version("torch"), "cpus": os.cpu_count()}
        print(json.dumps({**facts, "runs": args.runs, "rows": rows, "heavy": heavy, "ok": ok}, indent=2))
    else:
        print(f"python {platform.python_version()}, torch {version('torch')}, {os.cpu_count()} CPUs, {args.runs} runs")
        for row in rows:
            verdict = "ok" if row["median_s"] < row["limit_s"] else "MISSED"
            print(f"{row['what']:<26} median {row['median_s']:.3f} s  limit {row['limit_s']} s  {verdict}")
        if heavy:
            print(f"MISSED: import fla also imported {', '.join(heavy)}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
