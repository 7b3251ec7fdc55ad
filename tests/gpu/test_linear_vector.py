# SPDX-License-Identifier: MIT
"""The channel-decay kernels on a GPU: every case of benchmarks/ops/check_linear_vector.py, and the public ops."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import check_linear_vector
from linear_vector_reference import make_inputs, ratio, recurrence

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def outcomes(cases):
    return cases(check_linear_vector.__file__)


@pytest.mark.parametrize("name", list(check_linear_vector.CASES))
def test_outputs_and_gradients_match_the_recurrence_and_repeat_bit_for_bit(name, outcomes):
    r = outcomes[name]
    assert "fail" not in r, r["fail"]
    assert not r["wrong"], r["err"]
    assert r["same"]


@pytest.mark.parametrize("name", list(check_linear_vector.DECODES))
def test_token_by_token(name):
    assert max(check_linear_vector.check_decode(name).values()) < 5e-3


def _slots(T: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    rn = lambda *s: torch.randn(*s, device="cuda").to(dtype)
    x = {"q": rn(1, T, 8, 128), "k": rn(1, T, 4, 128), "v": rn(1, T, 4, 128), "s": rn(1, T, 4, 64).softmax(-1)}
    return {**x, "g": torch.nn.functional.logsigmoid(rn(1, T, 4, 64))}


@pytest.mark.parametrize("op", ["chunk_gla", "chunk_rwkv6", "chunk_gsa", "fused_recurrent_gsa"])
def test_the_public_ops_run_on_triton_and_agree_with_pytorch(op):
    import fla.ops
    from fla.backends import last_decision, use_backend

    fn = getattr(fla.ops, op)
    x = make_inputs(T=300, H=4, K=128, dtype=torch.bfloat16, device="cuda", bonus="rwkv6" in op)
    names = {"gk": "g"} if "gla" in op else {"q": "r", "gk": "w", "bonus": "u"}
    x = _slots(300) if "gsa" in op else {names.get(n, n): t for n, t in x.items()}
    results = []
    for backend in ("triton", "torch"):
        y = {n: t.clone().requires_grad_() for n, t in x.items()}
        with use_backend(backend, strict=True):
            o = fn(**y)[0]
            assert backend in str(last_decision())
            grads = torch.autograd.grad(o.float().square().sum(), list(y.values()))
        results.append([o, *grads])
    errors = [ratio(a, b) for a, b in zip(*results, strict=True)]
    assert errors[0] < 6e-3, errors
    assert max(errors) < 2e-2, errors


def test_graph_capture_replays_on_new_values_and_offsets():
    from fla.ops._linear.vector_entry import chunk_gla

    x = make_inputs(T=256, H=2, K=64, dtype=torch.bfloat16, device="cuda")
    cu = torch.tensor([0, 100, 200, 256], device="cuda")
    run = lambda: chunk_gla(x["q"], x["k"], x["v"], x["gk"], cu_seqlens=cu)[0]
    with torch.no_grad():
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = run()
        x["v"].copy_(torch.randn_like(x["v"]))
        cu.copy_(torch.tensor([0, 30, 31, 256], device="cuda"))
        graph.replay()
        assert torch.equal(o, run())
    want, _ = recurrence({n: t.double() for n, t in x.items()}, cu=[0, 30, 31, 256])
    assert ratio(o, want) < 5e-3
