# SPDX-License-Identifier: MIT
"""Cross entropy and its linear form against the formula in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fla.modules import FusedCrossEntropyLoss, FusedLinearCrossEntropyLoss
from fla.modules.fused_cross_entropy import cross_entropy_loss
from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss, logsumexp_fwd
from fla.modules.l2warp import l2_warp
from fla.utils import assert_close

OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"logit_scale": 0.5, "logit_softcapping": 3.0},
    {"lse_square_scale": 1e-2, "label_smoothing": 0.2, "logit_scale": 2.0},
]


def formula(
    logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    logit_softcapping: float | None = None,
) -> Tensor:
    z = logits.double() * logit_scale
    if logit_softcapping is not None:
        z = logit_softcapping * torch.tanh(z / logit_softcapping)
    lse = z.logsumexp(-1)
    loss = lse - (1 - label_smoothing) * z.gather(1, target.clamp(min=0)[:, None])[:, 0]
    loss = loss - label_smoothing * z.mean(-1) + lse_square_scale * lse.square()
    return loss.where(target != -100, 0.0)


def case(N: int = 13, V: int = 37, H: int = 8, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(N, H, dtype=dtype, requires_grad=True)
    W = torch.randn(V, H, dtype=dtype, requires_grad=True)
    target = torch.randint(0, V, (N,))
    target[::4] = -100
    return x, W, target


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("inplace", [True, False])
def test_cross_entropy(options: dict, reduction: str, inplace: bool):
    x, W, target = case()
    rows = formula(x @ W.T, target, **options)
    ref = {"mean": rows.sum() / (target != -100).sum(), "sum": rows.sum(), "none": rows}[reduction]
    loss = FusedCrossEntropyLoss(reduction=reduction, inplace_backward=inplace, **options)(x @ W.T, target)
    assert_close("loss", ref, loss, 1e-10)
    weights = torch.rand_like(ref)
    got = torch.autograd.grad((loss * weights).sum(), (x, W))
    for e, g in zip(torch.autograd.grad((ref * weights).sum(), (x, W)), got, strict=True):
        assert_close("grad", e, g, 1e-10)


def test_z_loss_is_part_of_the_loss_and_zero_on_ignored_rows():
    x, W, target = case()
    loss, z = FusedCrossEntropyLoss(reduction="none", lse_square_scale=0.3, return_z_loss=True)(x @ W.T, target)
    plain = FusedCrossEntropyLoss(reduction="none")(x @ W.T, target)
    assert_close("loss", plain + z, loss, 1e-10)
    assert (z[target == -100] == 0).all()
    assert not z.requires_grad


def test_losses_are_float32_for_16_bit_logits():
    x, W, target = case(dtype=torch.float32)
    loss = FusedCrossEntropyLoss()((x @ W.T).bfloat16(), target)
    assert loss.dtype == torch.float32
    half = fused_linear_cross_entropy_loss(x.half(), target, W.half())
    assert half.dtype == torch.float32
    assert_close("loss", F.cross_entropy(x @ W.T, target), half, 1e-2)


def test_forbidden_classes_have_minus_infinity():
    logits = torch.randn(3, 6, dtype=torch.float64)
    logits[:, 2] = -torch.inf
    logits.requires_grad_()
    target = torch.tensor([0, 1, 3])
    loss = cross_entropy_loss(logits, target)[0]
    assert_close("loss", F.cross_entropy(logits, target, reduction="none"), loss, 1e-10)
    loss.sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("options", OPTIONS[:3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
# 1 chunk, uneven chunks, more chunks than tokens; V < H means one chunk whatever is asked for.
@pytest.mark.parametrize(("N", "H", "num_chunks"), [(13, 8, 1), (13, 8, 3), (3, 8, 64), (13, 64, 8)])
def test_linear_cross_entropy(options: dict, reduction: str, N: int, H: int, num_chunks: int):
    x, W, target = case(N=N, H=H)
    b = torch.randn(W.shape[0], dtype=torch.float64, requires_grad=True)
    rows = formula(F.linear(x, W, b), target, **options)
    ref = rows.sum() / ((target != -100).sum() if reduction == "mean" else 1)
    loss = FusedLinearCrossEntropyLoss(reduction=reduction, num_chunks=num_chunks, **options)(x, target, W, b)
    assert_close("loss", ref, loss, 1e-10)
    got = torch.autograd.grad(loss * 3, (x, W, b))
    for e, g in zip(torch.autograd.grad(ref * 3, (x, W, b)), got, strict=True):
        assert_close("grad", e, g, 1e-10)


def test_a_retained_graph_gives_the_same_gradient_twice():
    x, W, target = case()
    loss = fused_linear_cross_entropy_loss(x, target, W)
    first = torch.autograd.grad(loss * 2, (x, W), retain_graph=True)
    again = torch.autograd.grad(loss * 2, (x, W))
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b)


def test_only_the_gradients_that_are_needed_are_formed():
    x, W, target = case()
    loss = fused_linear_cross_entropy_loss(x.detach(), target, W)
    assert torch.autograd.grad(loss, W)[0].shape == W.shape
    with torch.no_grad():
        assert not fused_linear_cross_entropy_loss(x, target, W).requires_grad


def test_all_rows_ignored():
    x, W, target = case()
    target = torch.full_like(target, -100)
    loss = fused_linear_cross_entropy_loss(x, target, W)
    assert loss == 0
    loss.backward()
    assert (x.grad == 0).all()
    assert FusedCrossEntropyLoss()(x @ W.T, target).isnan()


# M05: no more than one chunk of logits may be alive or saved.
def test_the_whole_logits_are_never_saved():
    x, W, target = case(N=256, V=512, H=8)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        fused_linear_cross_entropy_loss(x, target, W, use_l2warp=True).backward()
    assert max(saved) <= max(x.numel(), W.numel())


# N13: the penalty scales with the incoming gradient, in both forms.
@pytest.mark.parametrize("scale", [1.0, 0.25, 3.0])
def test_l2warp_of_both_losses_is_the_stated_penalty(scale: float):
    x, W, target = case(N=12)
    logits = (x @ W.T).view(2, 6, -1)
    plain = F.cross_entropy(logits.flatten(0, 1), target)
    penalty = logits.max(-1).values
    ref = torch.autograd.grad(
        [plain * scale, penalty], (x, W), [torch.ones(()).double(), penalty.detach() * scale * 1e-4 / 12]
    )
    two = l2_warp(F.cross_entropy((a := (x @ W.T).view(2, 6, -1)).flatten(0, 1), target), a)
    one = fused_linear_cross_entropy_loss(x, target, W, use_l2warp=True, num_chunks=4)
    assert_close("loss", plain, one, 1e-10)
    assert_close("loss", plain, two, 1e-10)
    for loss in (one, two):
        for e, g in zip(ref, torch.autograd.grad(loss * scale, (x, W)), strict=True):
            assert_close("grad", e, g, 1e-10)


def test_autocast_decides_the_dtype_of_the_logits():
    x, W, target = case(N=64, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = fused_linear_cross_entropy_loss(x, target, W)
    loss.backward()
    assert loss.dtype == x.grad.dtype == W.grad.dtype == torch.float32
    assert_close("loss", F.cross_entropy(x @ W.T, target), loss, 2e-2)


@pytest.mark.parametrize("accumulate", [True, False])
def test_weight_gradients_of_16_bit_parameters(accumulate: bool):
    x, W, target = case(N=64)
    xb, Wb = x.detach().bfloat16(), W.detach().bfloat16().requires_grad_()
    fused_linear_cross_entropy_loss(xb, target, Wb, accumulate_grad_in_fp32=accumulate).backward()
    (ref,) = torch.autograd.grad(F.cross_entropy(xb.double() @ (w := Wb.double()).T, target), w)
    assert Wb.grad.dtype == torch.bfloat16
    assert_close("dW", ref, Wb.grad.double(), 1e-2)


def test_logsumexp():
    x = torch.randn(3, 9, dtype=torch.float64)
    assert_close("lse", (2 * torch.tanh(x * 0.5 / 2)).logsumexp(-1), logsumexp_fwd(x, 0.5, 2.0), 1e-12)


@pytest.mark.parametrize("target", [torch.tensor([0, 37]), torch.tensor([-1, 0])])
def test_targets_outside_the_classes_are_refused(target: Tensor):
    x, W, _ = case(N=2)
    with pytest.raises(ValueError, match="target"):
        cross_entropy_loss(x @ W.T, target)
    with pytest.raises(ValueError, match="target"):
        fused_linear_cross_entropy_loss(x, target, W)


def test_wrong_reductions_and_shapes():
    x, W, target = case()
    with pytest.raises(NotImplementedError, match="reduction"):
        FusedCrossEntropyLoss(reduction="batchmean")
    with pytest.raises(AssertionError, match="reduction"):
        FusedLinearCrossEntropyLoss(reduction="none")
    with pytest.raises(ValueError, match="weight"):
        fused_linear_cross_entropy_loss(x, target, W[:, :3])
    with pytest.raises(ValueError, match="target"):
        cross_entropy_loss(x @ W.T, target[:3])
