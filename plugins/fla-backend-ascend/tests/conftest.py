# SPDX-License-Identifier: MIT
"""The plugin from this folder, installed or not. No NPU is needed: kernels run in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import torch

# Before triton is imported by anything.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if importlib.util.find_spec("fla_backend_ascend") is None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
