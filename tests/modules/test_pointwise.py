# SPDX-License-Identifier: MIT
"""Activations, their gated forms, the MLP, and the paths modules are imported from."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import fla.modules.activations as A
from fla.modules import GatedMLP
from fla.utils import assert_close


@pytest.mark.parametrize(
    ("f", "ref"),
    [
        (A.sigmoid, torch.sigmoid),
        (A.swish, F.silu),
        (lambda x: A.logsigmoid(x, 2.0), lambda x: F.logsigmoid(x) / 2),
        (A.elu_p1, lambda x: F.elu(x) + 1),
        (A.sqrelu, lambda x: F.relu(x) ** 2),
        (A.fast_gelu_impl, lambda x: F.gelu(x, approximate="tanh")),
    ],
)
def test_activations_and_gradients(f, ref):
    torch.manual_seed(0)
    x = torch.randn(3, 40, dtype=torch.float64, requires_grad=True)
    dy = torch.randn_like(x)
    assert_close("y", ref(x), f(x), 1e-10)
    assert_close("dx", *(torch.autograd.grad((g(x) * dy).sum(), x)[0] for g in (ref, f)), 1e-10)
    assert f(x.bfloat16()).dtype == torch.bfloat16


def test_elu_p1_keeps_small_values():
    assert A.elu_p1(torch.tensor([-80.0])).item() == pytest.approx(1.8e-35, rel=0.01)


def pow_gate(x: torch.Tensor, m: float) -> torch.Tensor:
    return torch.where(x > 0, x.clamp(min=1e-30) ** (m / (x.clamp(min=0).sqrt() + 1)), x) * torch.sigmoid(x)


@pytest.mark.parametrize(
    ("f", "gate"), [(A.swiglu, F.silu), (A.sigmoidglu, torch.sigmoid), (A.powglu, lambda x: pow_gate(x, 3.0))]
)
def test_gated_activations_on_halves_of_one_tensor(f, gate):
    torch.manual_seed(0)
    both = torch.randn(3, 5, 24, dtype=torch.float64, requires_grad=True)
    x, y = both.chunk(2, -1)
    assert_close("z", gate(x) * y, f(x, y), 1e-10)
    (got,) = torch.autograd.grad(f(x, y).sum(), both)
    (ref,) = torch.autograd.grad((gate(x) * y).sum(), both)
    assert_close("grad", ref, got, 1e-10)
    with pytest.raises(ValueError, match="y"):
        f(x, y[:1])


def test_powglu_is_finite_at_zero_and_below():
    x = torch.tensor([0.0, -3.0, 1e-30], requires_grad=True)
    A.powglu(x, torch.ones(3)).sum().backward()
    assert x.grad.isfinite().all()


# D03: fp32 parameters on 16-bit activations under autocast.
def test_linear_forms_follow_autocast():
    x, y, W = torch.randn(2, 8).bfloat16(), torch.randn(2, 8).bfloat16(), torch.randn(3, 8)
    for f in (A.swiglu_linear, A.sigmoidglu_linear, A.powglu_linear):
        assert f(x, y, W, None).dtype == torch.bfloat16
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert f(x.float(), y.float(), W, None).dtype == torch.bfloat16


def test_compiled_swiglu_takes_any_length_of_a_sliced_view():
    f = torch.compile(lambda x: A.swiglu(*x.chunk(2, -1)), dynamic=True, fullgraph=True, backend="aot_eager")
    for n in (3, 5, 9):
        x = torch.randn(n, 16)
        assert torch.equal(f(x), A.swiglu(*x.chunk(2, -1)))


@pytest.mark.parametrize("act", ["swish", "powlu"])
def test_mlp_is_the_same_fused_or_not(act: str):
    mlp = GatedMLP(16, intermediate_size=24, hidden_act=act)
    x = torch.randn(2, 3, 16)
    fused = mlp(x, cu_seqlens=None)
    mlp.fuse_swiglu = False
    assert_close("y", mlp(x), fused, 1e-6)
    assert list(mlp.state_dict()) == ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]
    assert hasattr(mlp, "swiglu_linear") == (act == "swish")


def test_mlp_widths():
    assert GatedMLP(2048).intermediate_size == 5632
    assert GatedMLP(2304, hidden_ratio=4).intermediate_size == 6144
    with pytest.raises(ValueError, match="hidden_act"):
        GatedMLP(16, hidden_act="gelu")


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("fla.modules.l2norm", "fla.modules.norm.l2norm"),
        ("fla.modules.layernorm", "fla.modules.norm.layernorm"),
        ("fla.modules.layernorm_gated", "fla.modules.norm.layernorm_gated"),
        ("fla.modules.fused_norm_gate", "fla.modules.norm.fused_norm_gate"),
        ("fla.modules.conv.causal_conv1d", "fla.modules.causal_conv1d.ops"),
        ("fla.modules.conv.triton.ops", "fla.modules.causal_conv1d.ops"),
        ("fla.modules.conv.short_conv", "fla.modules.causal_conv1d.ops"),
    ],
)
def test_old_paths_lead_to_the_same_module(path: str, target: str):
    assert importlib.import_module(path) is importlib.import_module(target)


def test_old_names():
    from fla.modules.conv import causal_conv1d, triton
    from fla.modules.convolution import ShortConvolution
    from fla.modules.l2norm import l2_norm, l2norm

    assert l2_norm is l2norm
    assert triton.causal_conv1d is causal_conv1d
    assert ShortConvolution is importlib.import_module("fla.modules").ShortConvolution
    assert A.ACT2FN["silu"] is A.ACT2FN["swish"]


def test_importing_the_package_imports_no_block():
    code = "import sys, fla.modules; assert not [m for m in sys.modules if m.startswith('fla.modules.norm')]"
    subprocess.run([sys.executable, "-c", code], check=True)
