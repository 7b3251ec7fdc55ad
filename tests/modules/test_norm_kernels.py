# SPDX-License-Identifier: MIT
"""The norm kernels in the Triton interpreter against the PyTorch path in float64, and their launch policy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))

from kernel_cases import assert_kernels_match

from fla.backends import use_backend
from fla.modules import RMSNorm
from fla.modules._norm.covers import covers_norm
from fla.modules._norm.policy import MAX_WIDTH, back_stages, norm_plan
from fla.modules.norm.fused_norm_gate import layer_norm_gated, rms_norm_gated, rms_norm_swish_gate_linear
from fla.modules.norm.l2norm import l2norm
from fla.modules.norm.layernorm import group_norm, layer_norm, layer_norm_linear, rms_norm
from fla.modules.norm.layernorm_gated import layernorm_fn
from fla.ops._common.policy import CHIPS


@pytest.fixture(autouse=True)
def _seed():
    if torch.cuda.is_available():
        pytest.skip("a GPU checks the compiled kernels, in tests/gpu")
    torch.manual_seed(0)


def rows(D: int, n: int = 33) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(2, n, D), "weight": torch.randn(D), "bias": torch.randn(D)}


@pytest.mark.parametrize(("D", "n"), [(1, 3), (50, 33), (64, 5), (1200, 2)])
@pytest.mark.parametrize("rms", [True, False])
def test_norm_of_any_width(D: int, n: int, rms: bool):
    tensors = rows(D, n)
    if D == 1 and not rms:
        tensors["weight"].zero_()  # a centred row of one channel is nothing but rounding
    assert_kernels_match(layer_norm, tensors, is_rms_norm=rms)


@pytest.mark.parametrize("rms", [True, False])
@pytest.mark.parametrize("groups", [1, 4])
def test_residual_stream_and_groups(rms: bool, groups: int):
    tensors = {**rows(96), "residual": torch.randn(2, 33, 96)}
    assert_kernels_match(group_norm, tensors, num_groups=groups, is_rms_norm=rms, prenorm=True)
    assert_kernels_match(group_norm, tensors, num_groups=groups, is_rms_norm=rms)


def test_the_stream_keeps_the_dtype_of_the_residual():
    x, w = torch.randn(4, 64).half(), torch.ones(64)
    residual = torch.randn(4, 64)
    with use_backend("triton"):
        y, stream = rms_norm(x, w, None, residual, prenorm=True)
        assert (y.dtype, stream.dtype) == (torch.float16, torch.float32)
        assert rms_norm(x, w, None, prenorm=True)[1] is x
        wide = rms_norm(x, w, None, prenorm=True, residual_in_fp32=True)[1]
    torch.testing.assert_close(stream, x.float() + residual)
    torch.testing.assert_close(wide, x.float())


@pytest.mark.parametrize("D", [50, 64])
def test_a_norm_that_hands_its_input_on_adds_up_both_gradients(D: int):
    assert_kernels_match(rms_norm, {"x": torch.randn(2, 33, D), "weight": torch.randn(D)}, bias=None, prenorm=True)
    x = torch.randn(3, D, requires_grad=True)
    with use_backend("triton"):
        y, stream = rms_norm(x, torch.ones(D), None, prenorm=True)
        assert stream.data_ptr() == x.data_ptr()
        assert y.grad_fn is stream.grad_fn
        assert not rms_norm(x.detach(), torch.ones(D, requires_grad=True), None, prenorm=True)[1].requires_grad
    stream.sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(3, D))


def test_gradient_through_the_stream_alone():
    x, residual = (torch.randn(3, 32, requires_grad=True) for _ in range(2))
    with use_backend("triton"):
        rms_norm(x, torch.ones(32), None, residual, prenorm=True)[1].sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(3, 32))
    torch.testing.assert_close(residual.grad, torch.ones(3, 32))


@pytest.mark.parametrize("activation", ["swish", "sigmoid"])
@pytest.mark.parametrize("fn", [layer_norm_gated, rms_norm_gated])
def test_gated_norms(fn, activation: str):
    tensors = {**rows(50), "g": torch.randn(2, 33, 50), "residual": torch.randn(2, 33, 50)}
    assert_kernels_match(fn, tensors, activation=activation, prenorm=True)
    del tensors["residual"]
    assert_kernels_match(fn, tensors, activation=activation)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("group_size", [None, 16])
@pytest.mark.parametrize("rms", [True, False])
def test_grouped_norms_with_a_gate_before_or_after(before: bool, group_size: int | None, rms: bool):
    tensors = {**rows(64, 9), "z": torch.randn(2, 9, 64)}
    assert_kernels_match(layernorm_fn, tensors, norm_before_gate=before, group_size=group_size, is_rms_norm=rms)


def test_l2_norm_and_its_output_dtype():
    assert_kernels_match(l2norm, {"x": torch.randn(3, 17, 60)})
    with use_backend("triton"):
        assert l2norm(torch.randn(3, 60).half(), output_dtype=torch.float32).dtype == torch.float32
        assert torch.equal(l2norm(torch.zeros(2, 8)), torch.zeros(2, 8))


@pytest.mark.parametrize("residual", [True, False])
def test_norm_before_a_linear_layer(residual: bool):
    x, g = torch.randn(2, 9, 48), torch.randn(2, 9, 48)
    tensors = {"x": x, "norm_weight": torch.randn(48), "norm_bias": torch.randn(48)}
    tensors |= {"linear_weight": torch.randn(7, 48), "linear_bias": torch.randn(7)}
    if residual:
        tensors["residual"] = torch.randn(2, 9, 48)
    assert_kernels_match(layer_norm_linear, tensors, num_groups=3, prenorm=residual)
    assert_kernels_match(rms_norm_swish_gate_linear, {**tensors, "g": g})


@pytest.mark.parametrize("n", [1, 2, 4, 32])
def test_backward_with_fewer_rows_than_programs(n: int):
    assert_kernels_match(rms_norm, {"x": torch.randn(n, 64), "weight": torch.randn(64)}, bias=None)


def test_no_rows_no_gradient_needed_and_strided_rows():
    w = torch.ones(8, requires_grad=True)
    with use_backend("triton"):
        rms_norm(torch.randn(0, 8), w, None).sum().backward()
        assert torch.equal(w.grad, torch.zeros(8))
        x = torch.randn(4, 16)[:, ::2]
        torch.testing.assert_close(layer_norm(x, None, None), torch.nn.functional.layer_norm(x, (8,)))


def test_sixteen_bit_rows_with_float32_weights():
    tensors = {"x": torch.randn(5, 64).half(), "weight": torch.randn(64)}
    assert_kernels_match(rms_norm, tensors, limit=2e-3, bias=None)


def test_what_the_kernels_leave_to_pytorch():
    with use_backend("triton"):
        assert rms_norm(torch.randn(2, 8).double(), None, None).dtype == torch.float64
    covered, reason = covers_norm(torch.empty(1, MAX_WIDTH + 1), None, None, None)
    assert not covered
    assert str(MAX_WIDTH) in reason


def test_every_plan_fits_a_multiprocessor():
    for width in (1, 50, 128, 1024, 4096, 5120, MAX_WIDTH):
        for few in (False, True):
            plan = norm_plan(width, few)
            assert plan.width >= width
            assert plan.forward.warps <= 32
            assert plan.backward.warps <= 32
            assert plan.rows * plan.width <= max(4096, plan.width)
            for chip in CHIPS.values():
                for each in (4, 8, 16):
                    stages = back_stages(plan, chip, each)
                    tile = plan.back_rows * plan.width * each
                    assert stages == 1 or (stages - 1) * tile + 4 * plan.width < chip.smem


def test_modules_reach_the_kernels():
    norm = RMSNorm(32)
    x = torch.randn(3, 32)
    with use_backend("triton"):
        torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (32,), eps=1e-5))
