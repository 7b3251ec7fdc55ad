# SPDX-License-Identifier: MIT
"""The elementwise scan on a GPU: every case of benchmarks/ops/check_scan.py."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import check_scan

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", list(check_scan.CASES))
def test_results_and_gradients_match_float64_and_repeat_bit_for_bit(name: str):
    _, wrong = check_scan.check(name)
    assert not wrong
