# SPDX-License-Identifier: MIT
"""Kernels run in the Triton interpreter here: the variable must be set before anything imports triton.

Not where a GPU is, whose own lane (``tests/gpu``) runs the compiled kernels in the same process.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
