# SPDX-License-Identifier: MIT
"""The public ops of the delta family on a GPU: what runs on Triton, and whole training steps in a CUDA graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from fla.backends import last_decision, use_backend
from fla.ops.comba import chunk_comba, fused_recurrent_comba
from fla.ops.delta_rule import chunk_delta_rule
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.gdn2 import chunk_gdn2, fused_recurrent_gdn2
from fla.ops.kda import chunk_kda, fused_recurrent_kda

pytestmark = pytest.mark.gpu

TENSORS = {
    chunk_delta_rule: ("q", "k", "v", "beta"),
    chunk_gated_delta_rule: ("q", "k", "v", "g", "beta"),
    chunk_comba: ("q", "k", "v", "p", "g", "beta"),
    chunk_kda: ("q", "k", "v", "gk", "beta"),
    chunk_gdn2: ("q", "k", "v", "gk", "b", "w"),
    fused_recurrent_comba: ("q", "k", "p", "v", "g", "beta"),
    fused_recurrent_kda: ("q", "k", "v", "gk", "beta"),
    fused_recurrent_gdn2: ("q", "k", "v", "gk", "b", "w"),
}
OPS = [pytest.param(op, id=op.__name__) for op in TENSORS]


def arguments(op, B=1, T=150, H=2, K=64, V=64, dtype=torch.bfloat16):
    gen = torch.Generator(device="cuda").manual_seed(0)
    rn = lambda *s: torch.randn(*s, generator=gen, device="cuda")
    x = {
        "q": rn(B, T, H, K), "k": rn(B, T, H, K), "p": rn(B, T, H, K), "v": rn(B, T, H, V),
        "g": F.logsigmoid(rn(B, T, H) + 3), "gk": F.logsigmoid(rn(B, T, H, K) + 3), "beta": rn(B, T, H).sigmoid(),
        "b": rn(B, T, H, K).sigmoid(), "w": rn(B, T, H, V).sigmoid(),
    }  # fmt: skip
    return [x[n].to(dtype).requires_grad_() for n in TENSORS[op]]


def step(op, x, do, **flags):
    o, _ = op(*x, use_qk_l2norm_in_kernel=True, **flags)
    return [o.detach(), *torch.autograd.grad(o, x, do)]


@pytest.mark.parametrize("op", OPS)
def test_training_runs_on_triton_and_agrees_with_float64(op):
    x = arguments(op)
    do = torch.randn_like(x[2 if op is not fused_recurrent_comba else 3])
    got = step(op, x, do)
    assert "triton" in str(last_decision())
    wide = [t.detach().double().requires_grad_() for t in x]
    with use_backend("torch"):
        want = step(op, wide, do.double())
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        error = (a.double() - b).square().mean().sqrt() / b.square().mean().sqrt()
        assert error < (1e-2 if i else 5e-3), (i, float(error))


@pytest.mark.parametrize("op", OPS[:5])
@pytest.mark.parametrize("packed", [False, True])
def test_a_training_step_in_a_graph_follows_new_values_and_offsets(op, packed):
    cu = torch.tensor([0, 30, 30, 150], device="cuda") if packed else None
    x = arguments(op)
    do = torch.randn_like(x[2])
    flags = {"cu_seqlens": cu} if packed else {}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(op, x, do, **flags)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(op, x, do, **flags)
    with torch.no_grad():
        x[2].copy_(torch.randn_like(x[2]))
    if packed:
        cu.copy_(torch.tensor([0, 64, 149, 150]))
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(captured, step(op, x, do, **flags), strict=True):
        assert torch.equal(a, b)


def test_n05_half_precision_keys_that_are_no_unit_vectors():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 64, 1, 64).half().cuda() for _ in range(3))
    beta = torch.randn(1, 64, 1).sigmoid().cuda()
    o, S = chunk_delta_rule(q, k, v, beta, output_final_state=True)
    assert "triton" in str(last_decision())
    exact, exact_S = chunk_delta_rule(q.double(), k.double(), v.double(), beta, output_final_state=True)
    assert exact.abs().max() > 65504, "the case is meant to overflow float16"
    assert o.isfinite().all()
    assert (o.double() - exact.clamp(-65504, 65504)).norm() < 5e-3 * exact.clamp(-65504, 65504).norm()
    assert (S.double() - exact_S).norm() < 5e-3 * exact_S.norm()
