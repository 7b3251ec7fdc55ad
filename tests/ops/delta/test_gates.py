# SPDX-License-Identifier: MIT
"""Gate functions of KDA and the gated delta rule, and the write gate."""

from __future__ import annotations

import math

import pytest
import torch

from fla.ops.common.gate import fused_beta_sigmoid
from fla.ops.gated_delta_rule.gate import (
    fused_gdn_gate,
    gdn_gate_bwd,
    gdn_gate_chunk_cumsum,
    gdn_gate_fwd,
    naive_gdn_gate,
)
from fla.ops.kda.gate import (
    fused_kda_gate,
    kda_gate_bwd,
    kda_gate_chunk_cumsum,
    kda_gate_fwd,
    naive_kda_gate,
    naive_kda_lowerbound_gate,
)

HV, K = 3, 5


def raw(*shape, dtype=torch.float64):
    return (10 * torch.randn(*shape, dtype=torch.float64)).to(dtype)


def truth(g, A_log, dt_bias, lower_bound, vector=True):
    rest = (HV, K) if vector else (HV,)
    x = g if dt_bias is None else g + dt_bias.reshape(rest)
    rate = torch.ones(()) if A_log is None else A_log.reshape((HV, 1) if vector else (HV,)).exp()
    if lower_bound is not None:
        return lower_bound / (1 + (-rate * x).exp())
    return -rate * torch.log1p(x.exp())


CASES = [
    (True, True, None),
    (True, False, None),
    (True, True, -5.0),
    (False, True, -5.0),
    (False, False, -0.61),
]


@pytest.mark.parametrize(("with_a", "with_bias", "bound"), CASES)
@pytest.mark.parametrize("leading", [(2, 7), (4,), ()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_kda_gate_and_its_gradients(delta, with_a, with_bias, bound, leading, dtype) -> None:
    torch.manual_seed(0)
    g = raw(*leading, HV, K, dtype=dtype).requires_grad_()
    A_log = torch.randn(1, 1, HV, 1, dtype=torch.float64).requires_grad_() if with_a else None
    bias = torch.randn(HV * K, dtype=torch.float64).requires_grad_() if with_bias else None
    y = fused_kda_gate(g, A_log, bias, bound, output_dtype=torch.float64)
    wanted = truth(g.double(), A_log, bias, bound)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    assert delta.error(y, wanted.detach()) < tolerance
    assert torch.equal(kda_gate_fwd(g, A_log, bias, bound, output_dtype=torch.float64), y)
    naive = naive_kda_gate(g, A_log, bias) if bound is None else naive_kda_lowerbound_gate(g, A_log, bias, bound)
    assert delta.error(naive, wanted.detach()) < 1e-5

    dy = torch.randn_like(wanted)
    leaves = [t for t in (g, A_log, bias) if t is not None]
    gradients = torch.autograd.grad(y, leaves, dy)
    explicit = [t for t in kda_gate_bwd(g, A_log, bias, dy, bound) if t is not None]
    true = torch.autograd.grad(wanted, leaves, dy)
    for leaf, got, other, want in zip(leaves, gradients, explicit, true, strict=True):
        assert (got.shape, got.dtype) == (leaf.shape, leaf.dtype)
        assert torch.equal(got, other)
        assert delta.error(got, want.double()) < (1e-2 if got.dtype == torch.bfloat16 else tolerance)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gdn_gate_and_its_gradients(delta, with_bias, dtype) -> None:
    torch.manual_seed(0)
    g = raw(2, 7, HV, dtype=dtype).requires_grad_()
    A_log = torch.randn(HV, dtype=dtype).requires_grad_()
    bias = torch.randn(HV, dtype=dtype).requires_grad_() if with_bias else None
    y = fused_gdn_gate(g, A_log, bias, output_dtype=dtype)
    wide = [None if t is None else t.double() for t in (g, A_log, bias)]
    wanted = truth(*wide, None, vector=False)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    assert delta.error(y, wanted.detach()) < tolerance
    assert delta.error(naive_gdn_gate(g, A_log, bias), wanted.detach()) < 1e-5
    assert torch.equal(gdn_gate_fwd(g, A_log, bias, dtype), y)
    dy = torch.randn_like(y)
    leaves = [t for t in (g, A_log, bias) if t is not None]
    gradients = torch.autograd.grad(y, leaves, dy)
    explicit = [t for t in gdn_gate_bwd(g, A_log, bias, dy) if t is not None]
    true = torch.autograd.grad(wanted, leaves, dy.double())
    for got, other, want in zip(gradients, explicit, true, strict=True):
        assert torch.equal(got, other)
        assert delta.error(got, want.double()) < tolerance


def test_gates_read_views_right() -> None:
    """Bug case S03: g as a chunk of a fused projection."""
    fused = torch.randn(2, 7, HV, 2 * K)
    view = fused.chunk(2, -1)[1]
    A_log = torch.randn(HV)
    assert torch.allclose(fused_kda_gate(view, A_log), fused_kda_gate(view.contiguous(), A_log), rtol=1e-6)


@pytest.mark.parametrize("offsets", [None, [0, 5, 70, 77]], ids=str)
@pytest.mark.parametrize("vector", [True, False])
def test_sums_restart_with_chunks_and_sequences(delta, vector, offsets) -> None:
    """Bug case V06."""
    g = raw(1, 77, HV, *([K] if vector else []), dtype=torch.float32)
    A_log = torch.randn(HV)
    cu = None if offsets is None else torch.tensor(offsets)
    if vector:
        got = kda_gate_chunk_cumsum(g, A_log, 16, scale=1 / math.log(2), cu_seqlens=cu)
    else:
        got = gdn_gate_chunk_cumsum(g, A_log, 16, scale=1 / math.log(2), cu_seqlens=cu)
    y = truth(g.double(), A_log.double(), None, None, vector)
    parts = []
    for a, b in zip(offsets or [0], (offsets or [0, 77])[1:], strict=False):
        parts += [y[:, start : min(start + 16, b)].cumsum(1) for start in range(a, b, 16)]
    assert delta.error(got, torch.cat(parts, 1) / math.log(2)) < 1e-5


def test_bad_gates() -> None:
    g = torch.randn(1, 6, HV, K)
    with pytest.raises(ValueError, match="needs `A_log` or `lower_bound`"):
        fused_kda_gate(g)
    with pytest.raises(ValueError, match="`A_log` must have 3 elements"):
        fused_kda_gate(g, torch.zeros(HV + 1))
    with pytest.raises(ValueError, match="`dt_bias` must have 15 elements"):
        kda_gate_fwd(g, torch.zeros(HV), torch.zeros(HV))
    with pytest.raises(TypeError, match="`g` must be float16"):
        fused_gdn_gate(torch.zeros(1, 6, HV).int(), torch.zeros(HV))
    with pytest.raises(ValueError, match="`dyg` must have the shape of `g`"):
        kda_gate_bwd(g, torch.zeros(HV), dyg=g[:, 1:])
    with pytest.raises(AssertionError, match="`chunk_size` must be a power of two, got 48"):
        kda_gate_chunk_cumsum(g, torch.zeros(HV), 48)
    with pytest.raises(AssertionError, match="must have 4 axes"):
        kda_gate_chunk_cumsum(g[0], torch.zeros(HV), 16)
    with pytest.raises(AssertionError, match="expected to be 1 rather than 2"):
        kda_gate_chunk_cumsum(g.expand(2, -1, -1, -1), torch.zeros(HV), 16, cu_seqlens=torch.tensor([0, 6]))


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_beta_sigmoid(scale) -> None:
    x = torch.randn(2, 7, HV, dtype=torch.bfloat16).requires_grad_()
    y = fused_beta_sigmoid(x, scale)
    assert y.dtype == torch.float32
    wanted = scale * torch.sigmoid(x.detach().float())
    assert torch.equal(y, wanted)
    y.sum().backward()
    assert torch.allclose(x.grad.float(), wanted * (1 - wanted / scale), atol=1e-2)
    with pytest.raises(TypeError, match="`x` must be float16"):
        fused_beta_sigmoid(torch.ones(3).int())
