# SPDX-License-Identifier: MIT
"""Kernels run in the Triton interpreter here: the variable must be set before a kernel module is imported."""

import os
import sys
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "ops"))
