# SPDX-License-Identifier: MIT
from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(x) for x in (HERE.parents[2] / "benchmarks" / "ops", HERE.parent / "delta_triton", HERE)]


@pytest.fixture(autouse=True)
def interpreted() -> None:
    """These tests mean something in the interpreter only; on a GPU ``tests/gpu`` takes their place."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled where a GPU is")
    from triton.runtime.interpreter import InterpretedFunction

    from fla.ops._delta.kernels.decode import delta_recurrent

    assert isinstance(delta_recurrent, InterpretedFunction), "triton was imported before TRITON_INTERPRET was set"
