# SPDX-License-Identifier: MIT
"""The adapter under fla's conformance kit without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_the_adapter_passes_the_kit_with_a_stub_of_the_wheel():
    path = Path(__file__).with_name("stub_conformance.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(path)]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FLA_", "PYTEST_"))}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "flash_kda_stub: 0 cases ran" not in done.stdout
    assert "cases ran in the backend" in done.stdout
