# SPDX-License-Identifier: MIT
"""The low-level norm functions and autograd classes of 0.6.0, on PyTorch and in the Triton interpreter."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

from fla.backends import use_backend
from fla.modules.norm.fused_norm_gate import (
    LayerNormGatedFunction,
    LayerNormGatedLinearFunction,
    layer_norm_gated,
    layer_norm_gated_bwd,
    layer_norm_gated_fwd,
    layer_norm_swish_gate_linear,
)
from fla.modules.norm.l2norm import L2NormFunction, l2norm, l2norm_bwd, l2norm_fwd
from fla.modules.norm.layernorm import (
    LayerNormFunction,
    LayerNormLinearFunction,
    group_norm,
    layer_norm_bwd,
    layer_norm_fwd,
    layer_norm_linear,
)


@pytest.fixture(params=["torch", "triton"], autouse=True)
def _path(request):
    """Both paths of the low-level functions; the public functions they are compared with run in float64, on PyTorch."""
    torch.manual_seed(0)
    if request.param == "triton":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("a GPU checks the compiled kernels, in tests/gpu")
    with use_backend("triton") if request.param == "triton" else contextlib.nullcontext():
        yield


def assert_same(got, want, leaves: list[Tensor]):
    """Results and gradients of ``got(*leaves)`` equal those of ``want`` in float64."""
    results = []
    for fn, dtype in ((got, torch.float32), (want, torch.float64)):
        x = [t.to(dtype).requires_grad_() for t in leaves]
        out = fn(*x)
        out = out if isinstance(out, tuple) else (out,)
        torch.manual_seed(1)
        grads = [torch.randn(o.shape, dtype=torch.float64).to(dtype) for o in out]
        results.append([*out, *torch.autograd.grad(out, x, grads)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


def rn(*shape: int) -> Tensor:
    return torch.randn(shape)


@pytest.mark.parametrize("rms", [True, False])
@pytest.mark.parametrize("groups", [1, 4])
def test_autograd_of_norms(rms: bool, groups: int):
    leaves = [rn(2, 5, 32), rn(32), rn(32), rn(2, 5, 32)]
    assert_same(
        lambda x, w, b, r: LayerNormFunction.apply(x, w, b, r, 1e-5, True, False, rms, groups),
        lambda x, w, b, r: group_norm(x, w, b, r, 1e-5, True, False, rms, groups),
        leaves,
    )
    assert_same(
        lambda x, w, b: LayerNormFunction.apply(x, w, b, None, 1e-5, True, False, rms, groups),
        lambda x, w, b: group_norm(x, w, b, None, 1e-5, True, False, rms, groups),
        leaves[:3],
    )
    assert_same(
        lambda x, w, b, r, lw, lb: LayerNormLinearFunction.apply(x, w, b, lw, lb, r, 1e-5, True, False, rms, groups),
        lambda x, w, b, r, lw, lb: layer_norm_linear(x, w, b, lw, lb, r, 1e-5, True, False, rms, groups),
        [*leaves, rn(7, 32), rn(7)],
    )


@pytest.mark.parametrize("activation", ["swish", "sigmoid"])
def test_autograd_of_gated_norms(activation: str):
    leaves = [rn(2, 5, 32), rn(2, 5, 32), rn(32), rn(32)]
    assert_same(
        lambda x, g, w, b: LayerNormGatedFunction.apply(x, g, w, b, activation),
        lambda x, g, w, b: layer_norm_gated(x, g, w, b, activation),
        leaves,
    )
    assert_same(
        lambda x, g, w, b, lw: LayerNormGatedLinearFunction.apply(x, g, w, b, lw, None),
        lambda x, g, w, b, lw: layer_norm_swish_gate_linear(x, g, w, b, lw, None),
        [*leaves, rn(7, 32)],
    )


def test_autograd_of_the_l2_norm():
    assert_same(lambda x: L2NormFunction.apply(x, 1e-6), lambda x: l2norm(x, 1e-6), [rn(2, 5, 33)])


def test_passes_by_themselves():
    x, w = rn(12, 8), rn(32)
    y, mean, rstd, stream = layer_norm_fwd(x, w, None, num_groups=4)
    assert stream is x
    assert mean.shape == rstd.shape == (12,)
    assert mean.dtype == torch.float32
    dy = rn(12, 8)
    dx, dw, db, dres, again = layer_norm_bwd(dy, x, w, None, mean, rstd, recompute_output=True, num_groups=4)
    assert dx.shape == x.shape
    assert dw.shape == (32,)
    assert (db, dres) == (None, None)
    torch.testing.assert_close(again, y)
    _, none, rstd, stream = layer_norm_fwd(
        x.half(), None, None, residual=x, residual_dtype=torch.float64, is_rms_norm=True
    )
    assert none is None
    assert stream.dtype == torch.float64
    y, mean, rstd, _ = layer_norm_gated_fwd(x, x, None, None)
    assert len(layer_norm_gated_bwd(dy, x, x, None, None, mean=mean, rstd=rstd)) == 5
    y, rstd = l2norm_fwd(x.view(3, 4, 8), output_dtype=torch.float16)
    assert (y.dtype, rstd.shape) == (torch.float16, (3, 4))
    assert l2norm_bwd(y, rstd, y).shape == y.shape


def test_a_backward_pass_needs_its_statistics():
    with pytest.raises(ValueError, match="rstd"):
        layer_norm_bwd(rn(2, 8), rn(2, 8), None, None)
