# SPDX-License-Identifier: MIT
"""Kernels run in the Triton interpreter here: the variable must be set before a kernel module is imported.

Not where a GPU is, whose own lane (``tests/gpu``) runs the compiled kernels in the same process.
"""

import os
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "ops"))
