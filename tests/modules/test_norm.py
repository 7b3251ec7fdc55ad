# SPDX-License-Identifier: MIT
"""Norms against their formulas in float64, the residual stream, gates, and what the parameters are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fla.modules import (
    FusedLayerNormGated,
    FusedLayerNormSwishGate,
    FusedRMSNormGated,
    FusedRMSNormSwishGate,
    FusedRMSNormSwishGateLinear,
    GroupNorm,
    GroupNormLinear,
    L2Norm,
    LayerNorm,
    LayerNormLinear,
    RMSNorm,
    RMSNormLinear,
)
from fla.modules.norm import LayerNormGated, RMSNormGated
from fla.modules.norm.l2norm import l2norm
from fla.modules.norm.layernorm import group_norm, group_norm_ref, layer_norm, rms_norm
from fla.modules.norm.layernorm_gated import rms_norm_ref, rmsnorm_fn
from fla.utils import assert_close


def formula(s: Tensor, w: Tensor | None, b: Tensor | None, G: int, rms: bool, eps: float = 1e-5) -> Tensor:
    return group_norm_ref(s, w, b, G, eps=eps, is_rms_norm=rms)


@pytest.mark.parametrize(("rows", "D", "G"), [(1, 50, 1), (3, 48, 4), (32, 64, 1)])
@pytest.mark.parametrize("rms", [True, False])
@pytest.mark.parametrize("affine", ["both", "weight", "none"])
def test_norm_of_a_residual_stream_and_its_gradients(rows: int, D: int, G: int, rms: bool, affine: str):
    torch.manual_seed(0)
    x, r = (torch.randn(rows, D, dtype=torch.float64, requires_grad=True) for _ in range(2))
    w = torch.randn(D, dtype=torch.float64, requires_grad=True) if affine != "none" else None
    b = torch.randn(D, dtype=torch.float64, requires_grad=True) if affine == "both" else None
    y, s = group_norm(x, w, b, r, prenorm=True, is_rms_norm=rms, num_groups=G)
    ref_s = x + r
    ref = formula(ref_s, w, b, G, rms)
    assert_close("y", ref, y, 1e-10)
    assert_close("s", ref_s, s, 1e-10)
    dy, ds = torch.randn_like(y), torch.randn_like(s)
    wanted = [t for t in (x, r, w, b) if t is not None]
    got = torch.autograd.grad((y * dy).sum() + (s * ds).sum(), wanted)
    expected = torch.autograd.grad((ref * dy).sum() + (ref_s * ds).sum(), wanted)
    for e, g in zip(expected, got, strict=True):
        assert_close("grad", e, g, 1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_norms_compute_in_float32(dtype: torch.dtype):
    torch.manual_seed(0)
    x = (torch.randn(8, 96) * 300).to(dtype)  # squares overflow float16
    w = torch.randn(96)
    for y, rms in ((rms_norm(x, w, None), True), (layer_norm(x, w, None), False)):
        assert y.dtype == dtype
        assert_close("y", formula(x.double(), w.double(), None, 1, rms), y.double(), 5e-3)


def test_dtype_of_the_residual_stream():
    x, r = torch.randn(2, 8).bfloat16(), torch.randn(2, 8)
    norm = RMSNorm(8)
    assert norm(x, prenorm=True)[1] is x
    assert norm(x, prenorm=True, residual_in_fp32=True)[1].dtype == torch.float32
    assert norm(x, residual=r, prenorm=True)[1].dtype == torch.float32
    assert norm(x, residual=r.bfloat16(), prenorm=True, residual_in_fp32=True)[1].dtype == torch.bfloat16


def test_no_rows():
    x = torch.randn(2, 0, 8, requires_grad=True)
    for norm in (RMSNorm(8), LayerNorm(8), GroupNorm(2, 8)):
        norm(x).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape


# N16: a weight near one in bfloat16 cannot follow small steps.
def test_norm_weights_follow_small_steps_when_built_in_bfloat16():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        norms = [RMSNorm(8), LayerNorm(8, bias=True), GroupNorm(2, 8), FusedRMSNormGated(8), RMSNormGated(8)]
    finally:
        torch.set_default_dtype(before)
    for norm in norms:
        assert norm.weight.dtype == torch.float32
        with torch.no_grad():
            norm.weight -= 1e-4
        assert (norm.weight != 1).all()
    assert RMSNorm(8, dtype=torch.bfloat16).weight.dtype == torch.bfloat16


def test_parameters_are_registered_even_when_absent():
    assert list(RMSNorm(8).state_dict()) == ["weight"]
    assert list(LayerNorm(8, bias=True).state_dict()) == ["weight", "bias"]
    bare = LayerNorm(8, elementwise_affine=False)
    assert bare.weight is None
    assert bare.bias is None
    bare.reset_parameters()


def test_norms_followed_by_a_linear_layer():
    torch.manual_seed(0)
    x, r, W, b = torch.randn(3, 8), torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)
    for fused, plain in (
        (RMSNormLinear(8), RMSNorm(8)),
        (LayerNormLinear(8, bias=True), LayerNorm(8, bias=True)),
        (GroupNormLinear(2, 8), GroupNorm(2, 8)),
    ):
        y, s = fused(x, W, b, r, prenorm=True)
        assert torch.equal(y, F.linear(plain(x, r), W, b))
        assert torch.equal(s, x + r)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert RMSNormLinear(8)(x, W, b).dtype == torch.bfloat16


@pytest.mark.parametrize("activation", ["swish", "silu", "sigmoid"])
@pytest.mark.parametrize("rms", [True, False])
def test_gated_norm_and_its_gradients(activation: str, rms: bool):
    torch.manual_seed(0)
    norm = (FusedRMSNormGated if rms else FusedLayerNormGated)(12, activation=activation).double()
    x, g, r = (torch.randn(4, 12, dtype=torch.float64, requires_grad=True) for _ in range(3))
    y, s = norm(x, g, r, prenorm=True)
    gate = torch.sigmoid(g) if activation == "sigmoid" else F.silu(g)
    ref = formula(x + r, norm.weight, None, 1, rms) * gate
    assert_close("y", ref, y, 1e-10)
    assert torch.equal(s, x + r)
    dy = torch.randn_like(y)
    wanted = (x, g, r, norm.weight)
    for e, o in zip(
        torch.autograd.grad((ref * dy).sum(), wanted), torch.autograd.grad((y * dy).sum(), wanted), strict=True
    ):
        assert_close("grad", e, o, 1e-10)


def test_swish_gates_are_the_gated_norms_with_swish():
    x, g = torch.randn(2, 8), torch.randn(2, 8)
    assert torch.equal(FusedRMSNormSwishGate(8)(x, g), FusedRMSNormGated(8)(x, g))
    assert torch.equal(FusedLayerNormSwishGate(8)(x, g), FusedLayerNormGated(8)(x, g))
    W = torch.randn(3, 8)
    assert torch.equal(FusedRMSNormSwishGateLinear(8)(x, g, W), F.linear(FusedRMSNormGated(8)(x, g), W))
    with pytest.raises(ValueError, match="weight"):
        FusedRMSNormSwishGateLinear(8)(x, g)


def test_positional_order_of_the_gated_norms_differs_as_in_the_reference():
    assert FusedRMSNormGated(8, True, 1e-3, "sigmoid").activation == "sigmoid"
    assert FusedLayerNormGated(8, True, True, "sigmoid", 1e-3).eps == 1e-3


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("group_size", [None, 4])
def test_grouped_gated_norm(before: bool, group_size: int | None):
    x, z, w, b = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8), torch.randn(8)
    y = rmsnorm_fn(x, w, b, z, 1e-5, group_size, before)
    assert_close("y", rms_norm_ref(x, w, b, z, 1e-5, group_size, before), y, 1e-5)
    assert list(RMSNormGated(8).state_dict()) == ["weight"]
    assert list(LayerNormGated(8).state_dict()) == ["weight", "bias"]
    assert RMSNormGated(8).norm_before_gate is False
    assert LayerNormGated(8).norm_before_gate is True


def test_l2norm_has_its_epsilon_under_the_root():
    x = torch.randn(3, 60, dtype=torch.float64, requires_grad=True)
    assert_close("y", x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt(), l2norm(x), 1e-12)
    assert_close("y", F.normalize(x, dim=-1), L2Norm()(x), 1e-6)
    zero = torch.zeros(1, 4, requires_grad=True)
    l2norm(zero).sum().backward()
    assert zero.grad is not None
    assert zero.grad.isfinite().all()
    assert l2norm(x.half(), output_dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda x: GroupNorm(3, 8), "num_groups"),
        (lambda x: rms_norm(x, torch.ones(7), None), "weight"),
        (lambda x: rms_norm(x, None, None, residual=torch.ones(1, 8)), "residual"),
        (lambda x: FusedRMSNormGated(8, activation="relu"), "activation"),
        (lambda x: FusedRMSNormGated(8)(x, torch.ones(8)), "g"),
        (lambda x: LayerNormGated(8, group_size=3)(x), "group_size"),
    ],
)
def test_wrong_arguments_are_named(call, match: str):
    with pytest.raises(ValueError, match=match):
        call(torch.randn(2, 8))
