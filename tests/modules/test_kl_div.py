# SPDX-License-Identifier: MIT
"""Distillation loss through two linear layers against PyTorch in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fla.modules import FusedKLDivLoss
from fla.modules.fused_kl_div import fused_kl_div_loss
from fla.utils import assert_close


def case(N: int, H: int = 6, Ht: int = 9, V: int = 37, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    x, w = torch.randn(N, H).to(dtype).requires_grad_(), torch.randn(V, H).to(dtype).requires_grad_()
    return x, torch.randn(N, Ht).to(dtype), w, torch.randn(V, Ht).to(dtype)


def written_out(x: Tensor, xt: Tensor, w: Tensor, wt: Tensor) -> Tensor:
    p, q = (xt @ wt.T).softmax(-1), (x @ w.T).softmax(-1)
    return (p * (p.log() - q.log())).sum() / x.shape[0]


# One row, uneven chunks; H >= V is one chunk.
@pytest.mark.parametrize(("N", "H"), [(1, 6), (13, 6), (16, 6), (5, 40)])
@pytest.mark.parametrize("fp32", [True, False])
def test_loss_and_gradients(N: int, H: int, fp32: bool):
    x, xt, w, wt = case(N, H)
    loss, ref = FusedKLDivLoss(accumulate_grad_in_fp32=fp32)(x, xt, w, wt), written_out(x, xt, w, wt)
    assert_close("loss", ref, loss, 1e-10)
    got = torch.autograd.grad(loss * 3, (x, w), retain_graph=True)
    for e, g, again in zip(
        torch.autograd.grad(ref * 3, (x, w)), got, torch.autograd.grad(loss * 3, (x, w)), strict=True
    ):
        assert_close("grad", e, g, 1e-10)
        assert torch.equal(g, again)


@pytest.mark.parametrize(
    ("dtype", "fwd", "bwd"), [(torch.float32, 1e-5, 1e-5), (torch.float16, 5e-3, 1e-2), (torch.bfloat16, 5e-3, 1e-2)]
)
def test_low_precision(dtype: torch.dtype, fwd: float, bwd: float):
    x, xt, w, wt = case(19, dtype=dtype)
    loss = fused_kl_div_loss(x, xt, w, wt)
    assert loss.dtype == torch.float32
    x64, w64 = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    ref = written_out(x64, xt.double(), w64, wt.double())
    assert_close("loss", ref, loss.double(), fwd)
    for e, g in zip(torch.autograd.grad(ref, (x64, w64)), torch.autograd.grad(loss, (x, w)), strict=True):
        assert g.dtype == dtype
        assert_close("grad", e, g.double(), bwd)


def test_only_the_gradients_that_are_needed():
    x, xt, w, wt = case(5)
    loss = fused_kl_div_loss(x, xt, w.detach(), wt)
    loss.backward()
    assert x.grad is not None
    with torch.no_grad():
        assert not fused_kl_div_loss(x, xt, w, wt).requires_grad


def test_another_reduction_of_the_function_is_the_sum():
    x, xt, w, wt = case(5)
    torch.testing.assert_close(fused_kl_div_loss(x, xt, w, wt, "sum"), 5 * fused_kl_div_loss(x, xt, w, wt))
    with pytest.raises(ValueError, match="`reduction`"):
        FusedKLDivLoss(reduction="mean")


def test_no_rows_cost_nothing():
    x, xt, w, wt = case(0)
    loss = fused_kl_div_loss(x, xt, w, wt)
    assert loss == 0
    dx, dw = torch.autograd.grad(loss, (x, w))
    assert dx.shape == (0, 6)
    assert (dw == 0).all()


def test_a_class_that_the_teacher_rules_out_adds_nothing():
    x, _, w, _ = case(3, V=4)
    xt = torch.ones(3, 1, dtype=torch.float64)
    wt = torch.tensor([[0.3], [-torch.inf], [1.0], [0.2]], dtype=torch.float64)
    loss = fused_kl_div_loss(x, xt, w, wt)
    p, logq = (xt * wt.T).softmax(-1), (x @ w.T).log_softmax(-1)
    ref = (torch.xlogy(p, p) - p * logq).sum() / 3
    assert_close("loss", ref, loss, 1e-10)
    for e, g in zip(torch.autograd.grad(ref, (x, w)), torch.autograd.grad(loss, (x, w)), strict=True):
        assert_close("grad", e, g, 1e-10)


def test_a_teacher_that_requires_grad_is_refused():
    x, xt, w, wt = case(3)
    with pytest.raises(RuntimeError, match=r"`target_x`.*frozen teacher"):
        fused_kl_div_loss(x, xt.requires_grad_(), w, wt)
    with pytest.raises(RuntimeError, match=r"`target_weight`.*frozen teacher"):
        fused_kl_div_loss(x, xt.detach(), w, wt.requires_grad_())


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"x": torch.randn(2, 3, 6)}, "`x`"),
        ({"weight": torch.randn(37, 5)}, "`weight`"),
        ({"target_x": torch.randn(4, 9)}, "`target_x`"),
        ({"target_weight": torch.randn(36, 9)}, "`target_weight`"),
    ],
)
def test_bad_input_is_named(change: dict, name: str):
    kwargs = dict(zip(("x", "target_x", "weight", "target_weight"), case(3, dtype=torch.float32), strict=True))
    with pytest.raises(ValueError, match=name):
        fused_kl_div_loss(**{**kwargs, **change})


def test_compiles_in_one_graph():
    torch.compiler.reset()
    args = case(5)
    loss = torch.compile(fused_kl_div_loss, fullgraph=True, backend="aot_eager")(*args)
    torch.testing.assert_close(loss, fused_kl_div_loss(*args))
    torch.testing.assert_close(
        torch.autograd.grad(loss, args[2])[0], torch.autograd.grad(fused_kl_div_loss(*args), args[2])[0]
    )
