# SPDX-License-Identifier: MIT
"""Core's kernels under the NPU's policy, in Triton's interpreter: forward and backward against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fla_backend_ascend import heads, plugin
from fla_backend_ascend.chips import GRID_LIMIT, KIB
from fla_backend_ascend.policy import described

from fla.backends import use_backend
from fla.ops._common import policy
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.gla import chunk_gla
from fla.ops.kda import chunk_kda
from fla.ops.simple_gla import chunk_simple_gla

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


@pytest.fixture(autouse=True)
def npu():
    """CPU tensors stand for tensors of an NPU with a small buffer, so that blocks are cut."""
    policy.describe_chip("cpu", lambda device: described(112 * KIB, 20))
    yield
    policy.describe_chip("cpu", None)


def call(op, T=70, H=2, HV=None, K=32, V=48, **changes):
    torch.manual_seed(0)
    HV = HV or H
    x = {
        "q": F.normalize(torch.randn(1, T, H, K), dim=-1),
        "k": F.normalize(torch.randn(1, T, H, K), dim=-1),
        "v": torch.randn(1, T, HV, V),
        "initial_state": torch.randn(1, HV, K, V),
        "output_final_state": True,
    }
    if op in (chunk_kda, chunk_gla):
        x["g"] = F.logsigmoid(torch.randn(1, T, HV, K))
    else:
        x["g"] = F.logsigmoid(torch.randn(1, T, HV))
    if op in (chunk_kda, chunk_gated_delta_rule):
        x["beta"] = torch.rand(1, T, HV)
    return {**x, **changes}


def results(run, x, dtype):
    """Outputs, final states, and gradients of all tensors."""
    real = {n: t for n, t in x.items() if isinstance(t, torch.Tensor) and t.is_floating_point()}
    x = {**x, **{n: t.detach().to(dtype).requires_grad_() for n, t in real.items()}}
    o, final = run(**x)
    torch.manual_seed(1)
    weights = [torch.randn(y.shape, dtype=torch.float64) for y in (o, final)]
    (o.double() * weights[0]).sum().add((final.double() * weights[1]).sum()).backward()
    return {"o": o, "final": final, **{n: x[n].grad for n in real}}


def compare(op, x, limit=GRID_LIMIT):
    with use_backend("torch"):
        want = results(op, x, torch.float64)
    run = plugin.core_path(op.op)
    every = op.op.signature

    def in_parts(**given):
        bound = every.bind(**given)
        bound.apply_defaults()
        return heads.in_parts(run, dict(bound.arguments), limit)

    got = results(in_parts, x, torch.float32)
    for name, y in want.items():
        error = (got[name].double() - y).norm() / y.norm()
        assert error < 1e-5, (name, error)


@pytest.mark.parametrize(
    "op", [chunk_kda, chunk_gated_delta_rule, chunk_gla, chunk_simple_gla], ids=lambda f: f.__name__
)
def test_forward_and_backward_equal_float64(op):
    compare(op, call(op))


@pytest.mark.parametrize(
    "op", [chunk_kda, chunk_gated_delta_rule, chunk_gla, chunk_simple_gla], ids=lambda f: f.__name__
)
def test_packed_sequences_odd_sizes_grouped_heads_and_states_with_values_first(op):
    HV = 4 if op in (chunk_kda, chunk_gated_delta_rule) else 2
    x = call(op, T=75, HV=HV, K=20, V=40, cu_seqlens=torch.tensor([0, 5, 5, 75]), state_v_first=True)
    torch.manual_seed(2)
    compare(op, {**x, "initial_state": torch.randn(3, HV, 40, 20)})


@pytest.mark.parametrize("op", [chunk_gated_delta_rule, chunk_simple_gla], ids=lambda f: f.__name__)
def test_heads_in_parts_are_the_same(op):
    x = call(op, H=3, K=16, V=16)
    limit = heads.programs(70, 1, 16, 16) * 2  # two heads a part: 2 and 1
    assert heads.at_once(70, 1, 16, 16, 1, limit) == 2
    compare(op, x, limit)


def test_grouped_value_heads_stay_with_their_key_head():
    x = call(chunk_gated_delta_rule, H=2, HV=4, K=16, V=16)
    compare(chunk_gated_delta_rule, x, heads.programs(70, 1, 16, 16) * 2)


def test_parameters_of_the_gate_are_cut_with_their_heads():
    seen = []

    def run(q, A_log, dt_bias, **rest):
        seen.append((q.shape[2], A_log.tolist(), tuple(dt_bias.shape)))
        return rest["v"], None

    x = {"q": torch.zeros(1, 8, 2, 16), "v": torch.zeros(1, 8, 4, 16), "A_log": torch.arange(4.0)}
    x["dt_bias"] = torch.zeros(4 * 16)
    heads.in_parts(run, x, heads.programs(8, 1, 16, 16) * 2)
    assert seen == [(1, [0.0, 1.0], (32,)), (1, [2.0, 3.0], (32,))]
