# SPDX-License-Identifier: MIT
"""The scalar-decay kernels and decoding on a GPU: every case of benchmarks/ops/check_delta.py."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import check_decode
import check_delta

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def outcomes(cases):
    return cases(check_delta.__file__)


@pytest.mark.parametrize("name", list(check_delta.CASES))
def test_outputs_and_gradients_match_the_recurrence_and_repeat_bit_for_bit(name, outcomes):
    r = outcomes[name]
    assert "fail" not in r, r["fail"]
    assert "wrong" not in r, r["err"]
    assert "unsteady" not in r, r["unsteady"]


def test_decoding_matches_the_float64_path():
    for name, worst, limit in check_decode.check_decode():
        assert worst < limit, (name, worst)


def test_a_thread_without_context_can_launch():
    check_delta.check_thread()


def test_graph_capture_replays_on_new_values():
    check_delta.check_graph()
