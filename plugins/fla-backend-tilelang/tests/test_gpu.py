# SPDX-License-Identifier: MIT
"""On a Hopper card with tilelang and nvcc: fla's conformance kit, under a strict pin."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fla_backend_tilelang.plugin import KDA

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not KDA.is_available(), reason="no tilelang or nvcc"),
]


def test_the_conformance_kit_is_green():
    """In a process of its own: the kit needs the plugin as it is installed."""
    command = [sys.executable, "-m", "pytest", "--pyargs", "fla.testing.conformance", "--fla-backend", "tilelang"]
    done = subprocess.run(
        [*command, "-q", "-p", "no:cacheprovider"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
