# SPDX-License-Identifier: MIT
"""`benchmarks/models/throughput.py` at sizes for a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_SIZES = "--tiny --device cpu --models GLA --length 8 --batches 1 --steps 1 --warmup 0"
_DECODE = "--decode-batches 1 --decode-steps 8 --prompt 4"
SIZES, DECODE = _SIZES.split(), _DECODE.split()


def test_measures_and_compares(tmp_path: Path):
    script = [sys.executable, str(ROOT / "benchmarks" / "models" / "throughput.py"), *SIZES, *DECODE]
    out = subprocess.run(
        [*script, "--reference", str(ROOT), "--json", str(tmp_path / "out.json")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert out.returncode == 0, out.stdout + out.stderr
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [(row["package"], row["mode"]) for row in rows] == [
        ("ours", "first"),
        ("reference", "first"),
        ("ours", "train"),
        ("reference", "train"),
        *[("ours", "decode")] * 4,
        *[("reference", "decode")] * 4,
    ]
    assert not any("error" in row for row in rows)
    assert all(row["tokens_per_second"] > 0 for row in rows if row["mode"] != "first")
    assert "GLA train B1: " in out.stdout
    for way in ("generate", "step", "graph", "generate graph"):
        assert f"GLA decode B1 ({way}): " in out.stdout


def test_a_package_that_is_not_there_is_an_error_and_one_line(tmp_path: Path):
    script = [sys.executable, str(ROOT / "benchmarks" / "models" / "throughput.py"), *SIZES, *DECODE]
    out = subprocess.run(
        [*script, "--only-reference", "--reference", str(tmp_path), "--modes", "first"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert out.returncode == 1
    assert f"error fla is not in {tmp_path}" in out.stdout
