# SPDX-License-Identifier: MIT
"""What `fla new-backend` writes passes its own tests as it is, for ops of three families."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from fla.cli import main

# The whole kit takes minutes for the largest ops; of those a cut is run that has every kind of result in it.
CUTS = {
    "retention.parallel_retention": (),
    "delta_rule.chunk_delta_rule": ("-k", "plain or middle_empty or through or installed or imports or loads"),
    "simple_gla.fused_recurrent_simple_gla": (
        "-k",
        "plain or middle_empty or v_first or installed or imports or loads",
    ),
}


@pytest.mark.parametrize("op", CUTS)
def test_a_generated_package_passes_its_own_tests(op, tmp_path, installed, run_tests, capsys):
    folder = tmp_path / "fresh"
    assert main(["new-backend", "fresh", "--op", op, "--dir", str(folder)]) == 0
    done = run_tests(folder, installed(folder), *CUTS[op])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "fresh: 0 cases ran" not in done.stdout
    assert "0 failed" in done.stdout


@pytest.mark.skipif(importlib.util.find_spec("ruff") is None, reason="ruff is not installed")
def test_a_generated_package_is_formatted_and_lints(tmp_path):
    for op in ("kda.chunk_kda", "kda.fused_recurrent.fused_recurrent_kda_fwd", "kda.gate.fused_kda_gate"):
        folder = tmp_path / op
        assert main(["new-backend", "a-longer-name", "--op", op, "--dir", str(folder)]) == 0
        for words in (("format", "--check"), ("check", "--select", "E,F,I,B,UP")):
            command = [
                sys.executable,
                "-m",
                "ruff",
                *words,
                "--no-cache",
                "--config",
                str(folder / "pyproject.toml"),
                ".",
            ]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout
