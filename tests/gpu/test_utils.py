# SPDX-License-Identifier: MIT
"""The helpers of fla.ops.utils on a GPU: every case of benchmarks/ops/check_utils.py."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import check_utils

pytestmark = pytest.mark.gpu


def test_results_and_gradients_match_float64():
    assert check_utils.check() == []
