# SPDX-License-Identifier: MIT
"""The backend under fla's conformance kit without an NPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fla_backend_ascend.plugin import COVERED

# What the interpreter computes in time and as a chip does: float32, and token by token only short sequences.
CASES = (
    "(chunk and (forward-plain-float32 or backward-plain-float32 or backward-packed-several_empty "
    "or strides-column-packed or gva-packed)) or state-v_first-initial-final-packed or state-k_first-T0"
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_the_backend_passes_the_kit_in_the_interpreter():
    path = Path(__file__).with_name("stub_conformance.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", CASES, str(path)]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FLA_", "PYTEST_"))}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    ran = dict(re.findall(r"^  \w+\.(\w+) on cpu: (\d+) cases ran in the backend", done.stdout, re.MULTILINE))
    for function in (name for names in COVERED.values() for name in names):
        assert int(ran[function]) >= (5 if function.startswith("chunk") else 1), done.stdout[-4000:]
