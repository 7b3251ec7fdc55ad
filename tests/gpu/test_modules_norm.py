# SPDX-License-Identifier: MIT
"""The norm, elementwise, rotary and token shift kernels on a GPU: every case of benchmarks/modules/check_rows.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "modules"))

import check_rows

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", list(check_rows.CASES))
def test_results_and_gradients_match_float64_and_repeat_bit_for_bit(name: str):
    _, wrong = check_rows.check(name)
    assert not wrong
