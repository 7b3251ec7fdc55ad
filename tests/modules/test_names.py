# SPDX-License-Identifier: MIT
"""Paths and names of 0.6.0 under `fla.modules`, the older ones included, and what is only there for them."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F

NAMES = {
    "fla.modules": (
        "BitLinear FusedBitLinear FusedCrossEntropyLoss FusedKLDivLoss FusedLayerNormGated "
        "FusedLayerNormSwishGate FusedLayerNormSwishGateLinear FusedLinearCrossEntropyLoss "
        "FusedRMSNormGated FusedRMSNormSwishGate FusedRMSNormSwishGateLinear GatedMLP GroupNorm "
        "GroupNormLinear ImplicitLongConvolution L2Norm LayerNorm LayerNormLinear LongConvolution "
        "RMSNorm RMSNormLinear RotaryEmbedding ShortConvolution TokenShift"
    ),
    "fla.modules.norm": (
        "FusedLayerNormGatedLinear FusedRMSNormGatedLinear LayerNormGated RMSNormGated NormParallel RMSNorm"
    ),
    "fla.modules.causal_conv1d": (
        "causal_conv1d causal_conv1d_fwd causal_conv1d_bwd causal_conv1d_update "
        "causal_conv1d_update_states CausalConv1dFunction ShortConvolution"
    ),
    "fla.modules.causal_conv1d.ops": (
        "causal_conv1d causal_conv1d_fwd causal_conv1d_bwd causal_conv1d_update "
        "causal_conv1d_update_states CausalConv1dFunction"
    ),
    "fla.modules.causal_conv1d.cp": "causal_conv1d_cp CausalConv1dFunctionCP",
    "fla.modules.causal_conv1d.backends.cuda": "fast_causal_conv1d_fn causal_conv1d_cuda",
    "fla.modules.causal_conv1d.backends.cuda.ops": "fast_causal_conv1d_fn causal_conv1d_cuda",
    "fla.modules.causal_conv1d.backends.cuda.cp": "",
    "fla.modules.convolution": (
        "causal_conv1d ShortConvolution LongConvolution ImplicitLongConvolution fft_conv "
        "PositionalEmbedding causal_conv1d_cp fast_causal_conv1d_fn causal_conv1d_cuda "
        "causal_conv1d_update"
    ),
    "fla.modules.conv": "causal_conv1d ShortConvolution LongConvolution fft_conv",
    "fla.modules.conv.causal_conv1d": "causal_conv1d",
    "fla.modules.conv.short_conv": "ShortConvolution",
    "fla.modules.conv.triton": "",
    "fla.modules.conv.triton.ops": "causal_conv1d_fwd",
    "fla.modules.conv.triton.kernels": "",
    "fla.modules.conv.long_conv": "LongConvolution fft_conv",
    "fla.modules.conv.cp": "causal_conv1d_cp",
    "fla.modules.conv.cp.ops": "causal_conv1d_cp",
    "fla.modules.conv.cuda": "fast_causal_conv1d_fn",
    "fla.modules.conv.cuda.ops": "causal_conv1d_cuda",
    "fla.modules.long_conv": "fft_conv LongConvolution PositionalEmbedding ImplicitLongConvolution",
    "fla.modules.layernorm": (
        "layer_norm group_norm rms_norm layer_norm_linear group_norm_linear rms_norm_linear "
        "layer_norm_ref rms_norm_ref group_norm_ref layer_norm_fwd layer_norm_bwd LayerNorm RMSNorm "
        "GroupNorm LayerNormLinear RMSNormLinear GroupNormLinear GroupNormRef NormParallel "
        "LayerNormFunction LayerNormLinearFunction"
    ),
    "fla.modules.norm.layernorm": "layer_norm",
    "fla.modules.fused_norm_gate": (
        "FusedLayerNormGated FusedRMSNormGated FusedLayerNormSwishGate FusedRMSNormSwishGate "
        "FusedLayerNormGatedLinear FusedLayerNormSwishGateLinear FusedRMSNormGatedLinear "
        "FusedRMSNormSwishGateLinear layer_norm_gated rms_norm_gated layer_norm_swish_gate_linear "
        "rms_norm_swish_gate_linear layer_norm_gated_fwd layer_norm_gated_bwd LayerNormGatedFunction "
        "LayerNormGatedLinearFunction"
    ),
    "fla.modules.layernorm_gated": (
        "layernorm_fn rmsnorm_fn rms_norm_ref LayerNormGated RMSNormGated layer_norm_fwd layer_norm_bwd"
    ),
    "fla.modules.l2norm": "l2norm l2_norm L2Norm l2norm_fwd l2norm_bwd L2NormFunction",
    "fla.modules.fused_bitlinear": (
        "weight_quant activation_quant layer_norm_linear_quant rms_norm_linear_quant bit_linear "
        "BitLinear FusedBitLinear layer_norm_fwd_quant layer_norm_bwd LayerNormLinearQuantFn "
        "layer_norm_linear_quant_fn"
    ),
    "fla.modules.norm.layernorm_quant": (
        "layer_norm_quant_fwd LayerNormLinearQuantFunction layer_norm_linear_quant layer_norm_quant_bwd"
    ),
    "fla.modules.activations": (
        "sigmoid logsigmoid swish swiglu swiglu_linear sigmoidglu powglu powglu_linear elu_p1 sqrelu "
        "fast_gelu_impl bias_gelu_impl ACT2FN sigmoid_fwd sigmoid_bwd swish_fwd swish_bwd logsigmoid_fwd "
        "logsigmoid_bwd swiglu_fwd swiglu_fwdbwd sigmoidglu_fwd sigmoidglu_fwdbwd powglu_fwd "
        "powglu_fwdbwd elu_p1_fwd elu_p1_bwd gelu_fwd gelu_bwd bias_gelu bias_gelu_bwd relu_bwd "
        "sqrelu_fwd sqrelu_bwd sigmoidglu_linear SigmoidFunction SwishFunction LogSigmoidFunction "
        "ELUPlusOneFunction FastGeLUFunction GeLUFunction SquaredReLUFunction SwiGLUFunction "
        "SwiGLULinearFunction SigmoidGLUFunction SigmoidGLULinearFunction PowGLUFunction "
        "PowGLULinearFunction"
    ),
    "fla.modules.activations.ops": (
        "sigmoid logsigmoid swish swiglu swiglu_linear sigmoidglu powglu powglu_linear elu_p1 sqrelu "
        "fast_gelu_impl bias_gelu_impl ACT2FN sigmoid_fwd sigmoid_bwd swish_fwd swish_bwd logsigmoid_fwd "
        "logsigmoid_bwd swiglu_fwd swiglu_fwdbwd sigmoidglu_fwd sigmoidglu_fwdbwd powglu_fwd "
        "powglu_fwdbwd elu_p1_fwd elu_p1_bwd gelu_fwd gelu_bwd bias_gelu bias_gelu_bwd relu_bwd "
        "sqrelu_fwd sqrelu_bwd sigmoidglu_linear SigmoidFunction SwishFunction LogSigmoidFunction "
        "ELUPlusOneFunction FastGeLUFunction GeLUFunction SquaredReLUFunction SwiGLUFunction "
        "SwiGLULinearFunction SigmoidGLUFunction SigmoidGLULinearFunction PowGLUFunction "
        "PowGLULinearFunction"
    ),
    "fla.modules.fused_cross_entropy": (
        "FusedCrossEntropyLoss cross_entropy_loss cross_entropy_fwd cross_entropy_bwd "
        "fused_cross_entropy_forward CrossEntropyLossFunction FusedCrossEntropyFunction"
    ),
    "fla.modules.fused_linear_cross_entropy": (
        "fused_linear_cross_entropy_loss FusedLinearCrossEntropyLoss LinearLossParallel logsumexp_fwd "
        "fused_linear_cross_entropy_fwd fused_linear_cross_entropy_bwd "
        "fused_linear_cross_entropy_forward fused_linear_cross_entropy_backward"
    ),
    "fla.modules.l2warp": "l2_warp L2Wrap",
    "fla.modules.fused_kl_div": (
        "fused_kl_div_loss FusedKLDivLoss fused_kl_div_fwd fused_kl_div_bwd fused_kl_div_forward fused_kl_div_backward"
    ),
    "fla.modules.fused_kl_div.ops": "fused_kl_div_loss",
    "fla.modules.fused_cross_entropy.ops": "cross_entropy_loss",
    "fla.modules.fused_linear_cross_entropy.ops": "fused_linear_cross_entropy_loss",
    "fla.modules.grpo": "fused_grpo_loss grpo_loss_with_old_logps grpo_loss_torch",
    "fla.modules.grpo.ops": "grpo_loss_torch fused_grpo_loss",
    "fla.modules.rotary": "RotaryEmbedding rotary_embedding rotary_embedding_fwdbwd rotate_half rotary_embedding_ref",
    "fla.modules.rotary.ops": "rotary_embedding",
    "fla.modules.mlp": "GatedMLP SwiGLULinear SwiGLULinearParallel",
    "fla.modules.parallel": "PrepareModuleWeight",
    "fla.modules.token_shift": (
        "token_shift TokenShift token_shift_fwd token_shift_bwd token_shift_ref prepare_maxlens"
    ),
    "fla.modules.token_shift_cp": "token_shift_cp",
    "fla.modules.feature_map": (
        "HedgehogFeatureMap T2RFeatureMap DPFPFeatureMap HadamardFeatureMap "
        "LearnableOuterProductFeatureMap LearnablePolySketchNonNegativeFeatureMap TaylorFeatureMap "
        "RebasedFeatureMap ReLUFeatureMap SquaredReLUFeatureMap GELUFeatureMap SwishFeatureMap "
        "SigmoidFeatureMap flatten_diag_outer_product flatten_diag_outer_product_off1 is_power_of_2"
    ),
}


@pytest.mark.parametrize("path", list(NAMES))
def test_a_path_has_its_names_by_import_and_by_attribute(path: str):
    module = importlib.import_module(path)
    missing = [name for name in NAMES[path].split() if not hasattr(module, name)]
    assert not missing
    found = importlib.import_module("fla")
    for part in path.split(".")[1:]:
        found = getattr(found, part)


@pytest.mark.parametrize(
    ("path", "old", "new_path", "new"),
    [
        ("fused_bitlinear", "layer_norm_fwd_quant", "norm.layernorm_quant", "layer_norm_quant_fwd"),
        ("fused_bitlinear", "layer_norm_bwd", "norm.layernorm_quant", "layer_norm_quant_bwd"),
        ("fused_bitlinear", "LayerNormLinearQuantFn", "norm.layernorm_quant", "LayerNormLinearQuantFunction"),
        ("fused_bitlinear", "layer_norm_linear_quant_fn", "norm.layernorm_quant", "layer_norm_linear_quant"),
        ("fused_cross_entropy", "fused_cross_entropy_forward", "fused_cross_entropy", "cross_entropy_fwd"),
        ("fused_cross_entropy", "CrossEntropyLossFunction", "fused_cross_entropy", "FusedCrossEntropyFunction"),
        ("fused_kl_div", "fused_kl_div_forward", "fused_kl_div", "fused_kl_div_fwd"),
        ("fused_kl_div", "fused_kl_div_backward", "fused_kl_div", "fused_kl_div_bwd"),
        (
            "fused_linear_cross_entropy", "fused_linear_cross_entropy_forward",
            "fused_linear_cross_entropy.ops", "fused_linear_cross_entropy_fwd",
        ),
        (
            "fused_linear_cross_entropy", "fused_linear_cross_entropy_backward",
            "fused_linear_cross_entropy.ops", "fused_linear_cross_entropy_bwd",
        ),
        ("l2norm", "l2_norm", "norm.l2norm", "l2norm"),
        ("conv.short_conv", "causal_conv1d", "causal_conv1d.ops", "causal_conv1d"),
    ],
)  # fmt: skip
def test_an_old_name_is_the_new_thing(path: str, old: str, new_path: str, new: str):
    here, there = (importlib.import_module(f"fla.modules.{p}") for p in (path, new_path))
    assert getattr(here, old) is getattr(there, new)


def gradients(fn, leaves, g):
    leaves = [x.detach().requires_grad_() for x in leaves]
    return torch.autograd.grad(fn(*leaves), leaves, g)


@pytest.mark.parametrize("name", ["sigmoid", "swish", "logsigmoid", "elu_p1", "gelu", "sqrelu"])
def test_values_and_gradients_of_activations_by_themselves(name: str):
    from fla.modules import activations as A

    torch.manual_seed(0)
    x, g = torch.randn(3, 5, requires_grad=True), torch.randn(3, 5)
    fn = A.fast_gelu_impl if name == "gelu" else getattr(A, name)
    value, slope = getattr(A, f"{name}_fwd")(x), getattr(A, f"{name}_bwd")
    assert not value.requires_grad
    assert torch.equal(value, fn(x).detach())
    found = slope(g, x) if name in ("gelu", "sqrelu") else slope(x, g)
    assert torch.equal(found, gradients(fn, [x], g)[0])
    assert torch.equal(A.relu_bwd(g, x), g * (x > 0))


@pytest.mark.parametrize("name", ["swiglu", "sigmoidglu", "powglu"])
def test_values_and_gradients_of_gated_activations_by_themselves(name: str):
    from fla.modules import activations as A

    torch.manual_seed(0)
    x, y, g = torch.randn(3, 3, 5)
    fn = getattr(A, name)
    dx, dy, z = getattr(A, f"{name}_fwdbwd")(x, y, g, use_weight=True)
    assert torch.equal(z, getattr(A, f"{name}_fwd")(x, y))
    assert torch.equal(z, fn(x, y))
    for a, b in zip((dx, dy), gradients(fn, [x, y], g), strict=True):
        assert torch.equal(a, b)
    assert len(getattr(A, f"{name}_fwdbwd")(x, y, g)) == 2


def test_a_bias_before_gelu_gets_the_sum_of_its_gradients():
    from fla.modules import activations as A

    torch.manual_seed(0)
    y, bias, g = torch.randn(3, 5), torch.randn(5), torch.randn(3, 5)
    want = gradients(lambda u, b: F.gelu(u + b, approximate="tanh"), [y, bias], g)
    torch.testing.assert_close(A.bias_gelu_bwd(g, y, bias), want)
    torch.testing.assert_close(A.bias_gelu(y, bias), F.gelu(y + bias, approximate="tanh"))


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("rms", [True, False])
def test_passes_of_the_grouped_gated_norm(before: bool, rms: bool):
    from fla.modules.layernorm_gated import layer_norm_bwd, layer_norm_fwd, layernorm_fn

    torch.manual_seed(0)
    x, z, dy = torch.randn(3, 4, 6)
    w, b = torch.randn(2, 6)
    out = torch.empty(4, 6)
    y, mean, rstd = layer_norm_fwd(x, w, b, 1e-5, z, out, 3, before, rms)
    assert y is out
    s = (x if before else x * F.silu(z)).view(4, 2, 3)
    centred = s if rms else s - s.mean(-1, keepdim=True)
    torch.testing.assert_close(rstd, torch.rsqrt(centred.square().mean(-1) + 1e-5).t().flatten())
    assert (mean is None) == rms
    dz = torch.empty(4, 6)
    *found, again = layer_norm_bwd(dy, x, w, b, 1e-5, mean, rstd, z, 3, before, rms, recompute_output=True, dz=dz)
    assert found[3] is dz
    torch.testing.assert_close(again, y)
    want = gradients(lambda *a: layernorm_fn(a[0], a[1], a[2], a[3], 1e-5, 3, before, rms), [x, w, b, z], dy)
    torch.testing.assert_close(tuple(found), want)
    assert len(layer_norm_bwd(dy, x, w, None, 1e-5, mean, rstd)) == 4


@pytest.mark.parametrize("rms", [True, False])
def test_passes_of_the_quantised_norm(rms: bool):
    from fla.modules.fused_bitlinear import activation_quant, layer_norm_bwd, layer_norm_fwd_quant
    from fla.modules.norm.layernorm import layer_norm

    torch.manual_seed(0)
    x, dy = torch.randn(2, 4, 6)
    w = torch.randn(6)
    y, mean, rstd, stream = layer_norm_fwd_quant(x, w, None, is_rms_norm=rms)
    assert stream is x
    torch.testing.assert_close(y, activation_quant(layer_norm(x, w, None, is_rms_norm=rms)))
    dx, dw, db, dres, again = layer_norm_bwd(
        dy, x, w, None, 1e-5, mean, rstd, is_rms_norm=rms, recompute_output=True
    )  # fmt: skip
    assert db is None
    assert dres is None
    torch.testing.assert_close(again, y)
    # The rounding passes gradients as the identity does.
    want = gradients(lambda a, c: layer_norm(a, c, None, is_rms_norm=rms), [x, w], dy)
    torch.testing.assert_close((dx, dw), want)


def test_classes_without_context_parallelism_say_so():
    from fla.modules.convolution import CausalConv1dFunctionCP

    with pytest.raises(NotImplementedError, match="context parallel"):
        CausalConv1dFunctionCP.apply(torch.zeros(1, 4, 2), torch.zeros(2, 3), cp_context=object())
