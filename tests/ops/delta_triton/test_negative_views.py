# SPDX-License-Identifier: MIT
"""Kernels read memory; a view with the negative bit stands for the opposite of what is there."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from fla.backends import use_backend
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from fla.ops.kda import chunk_kda
from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd
from fla.ops.linear_attn import chunk_linear_attn
from fla.ops.simple_gla import chunk_simple_gla

pytestmark = pytest.mark.usefixtures("poisoned")


def negated(x):
    """``x`` as a view of its opposite."""
    view = torch._neg_view(-x.detach())
    assert view.is_neg()
    return view.requires_grad_(x.requires_grad)


def inputs(op):
    gen = torch.Generator().manual_seed(0)
    rn = lambda *s: torch.randn(*s, generator=gen)
    q, k, v = (rn(1, 20, 1, 16) for _ in range(3))
    gate = -rn(1, 20, 1).abs()
    if op is chunk_linear_attn:
        return [q, k, v]
    if op is chunk_simple_gla:
        return [q, k, v, gate]
    decay = -rn(1, 20, 1, 16).abs() if op is chunk_kda else gate
    return [q, torch.nn.functional.normalize(k, dim=-1), v, decay, rn(1, 20, 1).sigmoid()]


OPS = (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, chunk_kda, chunk_simple_gla, chunk_linear_attn)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_they_count_as_what_they_stand_for(op):
    found = []
    for view in (lambda x: x, negated, lambda x: x, negated):
        x = [view(t.clone()).requires_grad_() for t in inputs(op)]
        with use_backend("triton"):
            o = op(*x[:3], **dict(zip(("g", "beta"), x[3:], strict=False)))[0]
        do = view(torch.linspace(0, 1, o.numel()).view(o.shape))
        found.append([o, *torch.autograd.grad(o, x, do)])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_normalised_state_of_two_tensors_too():
    x = inputs(chunk_linear_attn)
    state = torch.randn(1, 1, 16, 16), torch.rand(1, 1, 1, 16)
    with use_backend("triton"):
        o = chunk_linear_attn(*x, initial_state=state)[0]
        again = chunk_linear_attn(*x, initial_state=tuple(map(negated, state)))[0]
    torch.testing.assert_close(o, again, rtol=0, atol=0)


def test_what_is_written_must_be_in_memory():
    q, k, v, g, beta = inputs(chunk_kda)
    state = torch.zeros(1, 1, 16, 16)
    call = {"initial_state": negated(state), "inplace_final_state": True}
    with torch.no_grad(), use_backend("triton"), pytest.raises(ValueError, match="negative bit"):
        fused_recurrent_kda_fwd(q, k, v, g, beta, **call)
