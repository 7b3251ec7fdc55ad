# SPDX-License-Identifier: MIT
"""The losses' kernels in the Triton interpreter, against the PyTorch path in float64 (tested on its own)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fla.backends import use_backend
from fla.modules import FusedCrossEntropyLoss
from fla.modules._loss.launch import row_plan, scale_
from fla.modules._loss.products import LOGITS, token_chunks
from fla.modules.fused_cross_entropy import cross_entropy_bwd, cross_entropy_fwd, cross_entropy_loss
from fla.modules.fused_kl_div import fused_kl_div_loss
from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss
from fla.modules.grpo import fused_grpo_loss
from fla.utils import assert_close

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels have their own lane"),
    # NumPy, which the interpreter computes with, warns of infinities that a kernel masks.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def compare(fn: Callable[..., Tensor], leaves: list[Tensor], grad: Tensor, tolerance: float = 1e-5) -> None:
    """Value and gradients of ``fn`` on Triton in float32 and on PyTorch in float64."""

    def run(dtype: torch.dtype) -> list[Tensor]:
        a = [t.detach().to(dtype).requires_grad_() for t in leaves]
        out = fn(*a)
        return [out.detach(), *torch.autograd.grad(out, a, grad.to(out.dtype))]

    with use_backend("triton", strict=True):
        got = run(torch.float32)
    for i, (r, g) in enumerate(zip(run(torch.float64), got, strict=True)):
        assert_close(str(i), r, g.double(), tolerance)


def targets(N: int, V: int) -> Tensor:
    target = torch.randint(0, V, (N,))
    target[1::4] = -100
    return target


# Classes fewer than a tile, exactly some tiles, and not a multiple of anything.
@pytest.mark.parametrize("V", [3, 256, 301, 5000])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"label_smoothing": 0.1},
        {"logit_scale": -0.7, "lse_square_scale": 0.01},
        {"logit_softcapping": 3.0, "logit_scale": 0.5, "label_smoothing": 0.1, "lse_square_scale": 0.01},
    ],
)
def test_cross_entropy(V: int, options: dict[str, Any]):
    torch.manual_seed(0)
    target = targets(6, V)
    compare(lambda z: cross_entropy_loss(z, target, **options)[0], [torch.randn(6, V) * 3], torch.randn(6))


def test_forbidden_classes_and_int32_targets():
    torch.manual_seed(0)
    logits = torch.randn(5, 300)
    logits[:, :200] = -float("inf")
    target = torch.tensor([200, 250, 299, -100, 201], dtype=torch.int32)
    z = logits.clone().requires_grad_()
    with use_backend("triton", strict=True):
        loss = cross_entropy_loss(z, target)[0]
        loss.sum().backward()
    a = logits.double().requires_grad_()
    ref = torch.nn.functional.cross_entropy(a, target.long(), reduction="none")
    ref.sum().backward()
    assert_close("loss", ref, loss.double(), 1e-5)
    assert_close("dlogits", a.grad, z.grad.double(), 1e-5)


def test_rows_of_a_wider_tensor_and_gradients_over_the_logits():
    torch.manual_seed(0)
    target, wide = targets(4, 100), torch.randn(4, 130)
    for logits in (wide[:, :100], wide[:, :100].t().contiguous().t(), wide[:, :100].contiguous()):
        with use_backend("triton", strict=True):
            loss, _, lse, total, first = cross_entropy_fwd(logits, target)
            apart = cross_entropy_bwd(logits, target, lse, torch.ones(4), total_classes=total, class_start_idx=first)
            mine = logits.clone()
            over = cross_entropy_bwd(mine, target, lse, torch.ones(()).expand(4), inplace_backward=True)
        assert over is mine or over.data_ptr() == mine.data_ptr()
        assert torch.equal(over, apart)
        assert_close("loss", cross_entropy_fwd(logits.double(), target)[0], loss.double(), 1e-5)
        assert not apart[1].any()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_every_target_ignored(reduction: str):
    z, target = torch.randn(3, 10, requires_grad=True), torch.full((3,), -100)
    with use_backend("triton", strict=True):
        loss = FusedCrossEntropyLoss(reduction=reduction)(z, target)
    assert loss.isnan() if reduction == "mean" else not loss.any()
    h, w = torch.randn(3, 4, requires_grad=True), torch.randn(10, 4, requires_grad=True)
    with use_backend("triton", strict=True):
        loss = fused_linear_cross_entropy_loss(h, target, w)
        loss.backward()
    assert loss == 0
    assert not h.grad.any()
    assert not w.grad.any()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum", "label_smoothing": 0.1, "logit_softcapping": 5.0},
        {"use_l2warp": True, "l2_penalty_factor": 0.3, "logit_scale": 0.5},
        {"num_chunks": 1, "accumulate_grad_in_fp32": False},
    ],
)
def test_linear_cross_entropy(options: dict[str, Any]):
    torch.manual_seed(0)
    target = targets(20, 101)
    leaves = [torch.randn(20, 16), torch.randn(101, 16), torch.randn(101)]
    compare(
        lambda x, w, b: fused_linear_cross_entropy_loss(x, target, w, b, **options), leaves, torch.tensor(3.0), 2e-5
    )


def test_the_first_of_equal_largest_logits_is_penalised():
    z = torch.tensor([[1.0, 2.0, 0.0, 2.0]])
    w = torch.eye(4).requires_grad_()
    x = z.clone().requires_grad_()
    options = {"use_l2warp": True, "l2_penalty_factor": 100.0}
    with use_backend("triton", strict=True):
        fused_linear_cross_entropy_loss(x, torch.tensor([-100]), w, **options).backward()
    assert x.grad[0].tolist() == [0.0, 200.0, 0.0, 0.0]


def test_a_retained_graph_gives_the_same_gradients_again():
    torch.manual_seed(0)
    x, w, target = torch.randn(9, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True), targets(9, 50)
    with use_backend("triton", strict=True):
        loss = fused_linear_cross_entropy_loss(x, target, w)
        first = torch.autograd.grad(loss * 3, (x, w), retain_graph=True)
        second = torch.autograd.grad(loss * 3, (x, w))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_divergence():
    torch.manual_seed(0)
    tx, tw = torch.randn(7, 6), torch.randn(301, 6)
    leaves = [torch.randn(7, 8), torch.randn(301, 8)]
    compare(lambda x, w: fused_kl_div_loss(x, tx.to(x.dtype), w, tw.to(x.dtype)), leaves, torch.tensor(3.0))


def test_a_class_that_the_teacher_rules_out_adds_nothing():
    from fla.modules._loss.launch import divergence

    s, t = torch.randn(2, 40), torch.randn(2, 40)
    t[:, 3:] = -float("inf")
    ref = (t.log_softmax(-1).exp() * (t.log_softmax(-1) - s.log_softmax(-1)))[:, :3].sum(-1)
    grad = (s.softmax(-1) - t.softmax(-1)) * 2
    assert_close("kl", ref, divergence(s, t, 2.0, True), 1e-5)
    assert_close("grad", grad, s, 1e-5)


def test_grpo():
    torch.manual_seed(0)
    ids, ref, advantage = torch.randint(0, 70, (2, 9)), torch.randn(2, 6) - 4, torch.randn(2)
    keep = torch.rand(2, 6) > 0.3
    compare(
        lambda z: fused_grpo_loss(z, ref.to(z.dtype), ids, advantage.to(z.dtype), completion_mask=keep),
        [torch.randn(2, 7, 70)],
        torch.randn(2, 6),
    )


def test_a_factor_of_one_leaves_the_tensor_and_others_scale_it():
    x = torch.randn(10000)
    assert torch.equal(scale_(x.clone(), torch.tensor(1.0)), x)
    assert torch.equal(scale_(x.clone(), torch.tensor(0.5)), x / 2)


@pytest.mark.parametrize("V", [1, 7, 300, 32000, 131072])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_row_plans(V: int, itemsize: int):
    plan = row_plan(V, itemsize)
    assert plan.warps * 32 * 16 // itemsize == plan.C
    assert plan.R in (1, 2, 4)


def test_chunks_of_logits_stay_small():
    chunks = token_chunks(16384, 4096, 131072, 8, 2)
    assert {c.stop - c.start for c in chunks} == {1024}
    assert LOGITS == 1024 * 131072 * 2
    assert token_chunks(0, 8, 8, 8, 2) == []
    assert token_chunks(100, 64, 64, 8, 2) == [slice(0, 100)]
