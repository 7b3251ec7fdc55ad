# SPDX-License-Identifier: MIT
"""Faults that other implementations had, each with the right value. The identifiers are those of the collection."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

from fla.ops.delta_rule import chunk_delta_rule, fused_recurrent_delta_rule
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from fla.ops.kda import chunk_kda, fused_recurrent_kda


def test_n05_unnormalised_half_keys_give_what_float32_gives() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 64, 1, 64).half() for _ in range(3))
    beta = torch.randn(1, 64, 1).sigmoid()
    o, S = chunk_delta_rule(q, k, v, beta, output_final_state=True)
    wide, wide_S = chunk_delta_rule(q.float(), k.float(), v.float(), beta, output_final_state=True)
    assert wide.abs().max() > 65504, "the case is meant to overflow float16"
    assert not o.isnan().any()
    assert torch.equal(o, wide.clamp(-65504, 65504).half())
    assert torch.equal(S, wide_S)


@pytest.mark.parametrize("op", [chunk_delta_rule, fused_recurrent_delta_rule])
def test_n08_no_gate_and_a_gate_of_zeros_have_equal_gradients(delta, op) -> None:
    gated = chunk_gated_delta_rule if op is chunk_delta_rule else fused_recurrent_gated_delta_rule
    x = {name: t.requires_grad_() for name, t in delta.inputs(2, 70, 2, 2, 8, 8, gate=None).items()}
    plain = torch.autograd.grad(op(**x)[0].square().sum(), list(x.values()))
    zeros = torch.autograd.grad(gated(**x, g=torch.zeros(2, 70, 2))[0].square().sum(), list(x.values()))
    assert all(delta.error(a, b.double()) < 1e-6 for a, b in zip(plain, zeros, strict=True))


@pytest.mark.parametrize("op", [chunk_gated_delta_rule, chunk_kda])
def test_n18_gate_gradient_under_strong_decay(delta, op) -> None:
    x = delta.inputs(1, 128, 1, 1, 128, 128, vector=op is chunk_kda, gate_in_kernel=True, dtype=torch.bfloat16)
    x["A_log"] = x["A_log"] + 3
    x["g"] = x["g"].bfloat16()
    flags = {"use_gate_in_kernel": True}
    delta.compare(delta.call(op, **flags), functools.partial(delta.truth, **flags), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_n20_a_gate_that_falls_by_more_than_90_in_16_tokens(delta, dtype) -> None:
    x = delta.inputs(1, 64, 1, 1, 16, 16, gate_in_kernel=True, dtype=dtype)
    x["A_log"] = torch.full((1,), 2.0)
    x["g"] = x["g"] + 4
    decay = -x["A_log"].exp() * F.softplus(x["g"].float() + x["dt_bias"].view(1, 16))
    assert decay[:, :16].sum(1).max() < -90
    flags = {"use_gate_in_kernel": True}
    for op in (chunk_kda, fused_recurrent_kda):
        delta.compare(delta.call(op, **flags), functools.partial(delta.truth, **flags), x)


@pytest.mark.parametrize("op", [chunk_kda, chunk_gated_delta_rule])
def test_q01_grouped_values_equal_repeated_heads(delta, op) -> None:
    x = delta.inputs(2, 70, 2, 4, 8, 8, vector=op is chunk_kda)
    grouped = op(**x)[0]
    repeated = {**x, "q": x["q"].repeat_interleave(2, 2), "k": x["k"].repeat_interleave(2, 2)}
    assert torch.equal(grouped, op(**repeated)[0])


@pytest.mark.parametrize("op", [chunk_kda, fused_recurrent_kda, chunk_gated_delta_rule])
def test_d02_read_out_beyond_float16_saturates(delta, op) -> None:
    x = delta.inputs(1, 3, 1, 1, 16, 16, vector=op is not chunk_gated_delta_rule, gate="zero", dtype=torch.float16)
    state = torch.full((1, 1, 16, 16), 1e5)
    o = op(**x, initial_state=state, scale=1.0)[0]
    assert o.isfinite().all()
    assert (o.abs() == 65504).any()


@pytest.mark.parametrize("op", [chunk_kda, chunk_gated_delta_rule, chunk_delta_rule])
def test_d04_odd_head_dim_in_bfloat16(delta, op) -> None:
    gate = None if op is chunk_delta_rule else "mild"
    x = delta.inputs(1, 40, 1, 1, 153, 31, gate=gate, vector=op is chunk_kda, dtype=torch.bfloat16)
    delta.compare(delta.call(op), delta.truth, x)


def test_s04_slices_of_one_projection(delta) -> None:
    fused = torch.randn(1, 77, 3 * 2 * 8)
    q, k, v = (t.view(1, 77, 2, 8) for t in fused.split(16, -1))
    x = delta.inputs(1, 77, 2, 2, 8, 8)
    for op in (chunk_kda, fused_recurrent_kda):
        sliced = op(q, F.normalize(k, dim=-1), v, x["g"], x["beta"])[0]
        whole = op(q.contiguous(), F.normalize(k, dim=-1), v.contiguous(), x["g"], x["beta"])[0]
        assert torch.equal(sliced, whole)


def test_long_gates_on_one_head(delta) -> None:
    """N01 in small: a gate of -20 on every fifth token."""
    x = delta.inputs(1, 300, 1, 1, 16, 16)
    x["g"][:, ::5] = -20.0
    delta.compare(delta.call(chunk_kda), delta.truth, x)
