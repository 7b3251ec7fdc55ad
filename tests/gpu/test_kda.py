# SPDX-License-Identifier: MIT
"""The vector-decay kernels on a GPU: every case of benchmarks/ops/check_kda.py, and the public op on them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import check_kda
from vector_reference import make_inputs, ratio

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def outcomes(cases):
    return cases(check_kda.__file__)


@pytest.mark.parametrize("name", list(check_kda.CASES))
def test_outputs_and_gradients_match_the_recurrence_and_repeat_bit_for_bit(name, outcomes):
    r = outcomes[name]
    assert "fail" not in r, r["fail"]
    assert not r["wrong"], r["err"]
    assert r["same"]


def test_the_public_op_runs_on_triton_and_agrees_with_pytorch():
    from fla.backends import last_decision, use_backend
    from fla.ops.kda import chunk_kda

    x = make_inputs(T=300, H=2, K=64, dtype=torch.bfloat16, device="cuda")
    args = (x["q"], x["k"], x["v"], x["g"], x["beta"])
    o, _ = chunk_kda(*args, use_qk_l2norm_in_kernel=True, safe_gate=True)
    assert "triton" in str(last_decision())
    with use_backend("torch"):
        want, _ = chunk_kda(*args, use_qk_l2norm_in_kernel=True, safe_gate=True)
    assert ratio(o, want) < 6e-3


def test_graph_capture_replays_on_new_values_and_offsets():
    from fla.ops._delta.vector_entry import chunk_kda

    x = make_inputs(T=256, H=2, K=64, dtype=torch.bfloat16, device="cuda")
    cu = torch.tensor([0, 100, 200, 200], device="cuda")
    args = (x["q"], x["k"], x["v"], x["g"], x["beta"])
    settings = {"use_qk_l2norm_in_kernel": True, "safe_gate": True, "cu_seqlens": cu, "use_graph": True}
    run = lambda: chunk_kda(*args, **settings)[0]
    with torch.no_grad():
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = run()
        x["v"].copy_(torch.randn_like(x["v"]))
        cu.copy_(torch.tensor([0, 30, 31, 250], device="cuda"))
        graph.replay()
        assert torch.equal(o, run())
        assert not o[:, 250:].any()
