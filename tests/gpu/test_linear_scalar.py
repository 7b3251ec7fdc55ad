# SPDX-License-Identifier: MIT
"""The scalar-decay kernels of the linear family on a GPU: every case of benchmarks/ops/check_linear.py."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import check_linear

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def outcomes(cases):
    return cases(check_linear.__file__)


@pytest.mark.parametrize("name", [*check_linear.CASES, *check_linear.NORMALIZED])
def test_outputs_and_gradients_match_the_recurrence_and_repeat_bit_for_bit(name, outcomes):
    r = outcomes[name]
    assert "fail" not in r, r["fail"]
    assert not r["wrong"], r


def test_decoding_matches_the_recurrence():
    assert check_linear.check_decode()


def test_public_ops_take_the_kernels():
    from fla.backends import last_decision
    from fla.ops import chunk_lightning_attn, chunk_retention, chunk_simple_gla, fused_recurrent_simple_gla

    x = check_linear.make_inputs(1, 200, 4, 64, dtype=torch.bfloat16, device="cuda")
    q, k, v = x["q"], x["k"], x["v"]
    chunk_simple_gla(**x)
    assert last_decision().backend == "triton"
    for call in (
        lambda: chunk_retention(q, k, v),
        lambda: chunk_lightning_attn(q, k, v, 0, 4),
        lambda: fused_recurrent_simple_gla(**x, reverse=True),
    ):
        call()
        assert last_decision().backend == "triton"


def test_results_can_be_captured_in_a_graph():
    from fla.ops import chunk_retention

    x = check_linear.make_inputs(1, 256, 4, 64, dtype=torch.bfloat16, device="cuda", gate=None)
    with torch.no_grad():
        want = chunk_retention(**x)[0].clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = chunk_retention(**x)[0]
        graph.replay()
    assert torch.equal(o, want)
