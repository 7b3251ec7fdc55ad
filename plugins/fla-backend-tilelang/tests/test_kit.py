# SPDX-License-Identifier: MIT
"""The host side of the plugin under fla's conformance kit without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kit runs the programs themselves")
def test_the_host_side_passes_the_kit_with_programs_in_torch():
    path = Path(__file__).with_name("stub_conformance.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(path)]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FLA_", "PYTEST_"))}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    ran = re.findall(r"^  \w+\.(\w+) on cpu: (\d+) cases ran in the backend", done.stdout, re.MULTILINE)
    assert {name for name, count in ran if int(count) >= 100} == {"chunk_gated_delta_rule", "chunk_kda"}, ran
