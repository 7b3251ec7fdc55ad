# SPDX-License-Identifier: MIT
"""GRPO losses against the objective written out in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fla.modules.grpo import fused_grpo_loss, grpo_loss_torch, grpo_loss_with_old_logps
from fla.utils import assert_close


def case(B: int = 3, L: int = 5, V: int = 13, K: int = 2, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    logits = torch.randn(B, L + 1, V, dtype=dtype, requires_grad=True)
    ids = torch.randint(0, V, (B, K + L))
    return logits, torch.randn(B, L, dtype=dtype) - 2, ids, torch.randn(B, dtype=dtype)


def written_out(
    logits: Tensor, ref: Tensor, ids: Tensor, A: Tensor, beta: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A loop over tokens; the loss's gradient is that of ``beta * kl - A * lp``."""
    B, L = ref.shape
    loss = kls = 0 * logits.sum() + torch.zeros_like(ref)  # a part of the graph even when every token is masked
    kls = kls.clone()
    for b in range(B):
        for t in range(L):
            if mask is not None and not mask[b, t]:
                continue
            lp = F.log_softmax(logits[b, t], -1)[ids[b, ids.shape[1] - L + t]]
            kl = torch.exp(ref[b, t] - lp) - (ref[b, t] - lp) - 1
            loss[b, t] = beta * kl - A[b] * (1 + lp - lp.detach())
            kls[b, t] = kl
    return loss, kls


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(("B", "L", "K"), [(3, 5, 2), (1, 1, 0), (2, 7, 4)])
def test_loss_kl_and_gradients(masked: bool, inplace: bool, B: int, L: int, K: int):
    logits, ref, ids, A = case(B, L, K=K)
    mask = torch.rand(B, L) > 0.4 if masked else None
    expected = written_out(logits, ref, ids, A, 0.3, mask)
    for fn, more in ((fused_grpo_loss, {"inplace": inplace}), (grpo_loss_torch, {})):
        clone = logits.detach().clone().requires_grad_()
        got = fn(clone * 1, ref, ids, A, 0.3, mask, True, **more)
        for name, e, g in zip(("loss", "kl"), expected, got, strict=True):
            assert_close(name, e, g, 1e-10)
        w = torch.rand(2, B, L, dtype=torch.float64)
        (dgot,) = torch.autograd.grad((got[0] * w[0] + got[1] * w[1]).sum(), clone)
        (dref,) = torch.autograd.grad((expected[0] * w[0] + expected[1] * w[1]).sum(), logits, retain_graph=True)
        assert_close("dlogits", dref, dgot, 1e-10)
        assert (dgot[:, -1] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_low_precision_logits(dtype: torch.dtype):
    logits, ref, ids, A = case(2, 9, 65, dtype=torch.float32)
    low = logits.detach().to(dtype).requires_grad_()
    loss, kl = fused_grpo_loss(low, ref, ids, A, save_kl=True)
    assert loss.dtype == kl.dtype == torch.float32
    exact = low.detach().double().requires_grad_()
    e_loss, e_kl = written_out(exact, ref.double(), ids, A.double(), 0.1, None)
    assert_close("loss", e_loss, loss.double(), 1e-5)
    assert_close("kl", e_kl, kl.double(), 1e-5)
    (e,), (g,) = torch.autograd.grad(e_loss.sum(), exact), torch.autograd.grad(loss.sum(), low)
    assert g.dtype == dtype
    assert_close("dlogits", e, g.double(), 1e-5 if dtype == torch.float32 else 1e-2)


def test_masked_tokens_may_hold_anything():
    logits, ref, ids, A = case()
    mask = torch.ones(3, 5)
    mask[0, 2] = mask[1] = 0
    ids[0, 4], ref[1, 0] = -1, torch.nan
    loss, kl = fused_grpo_loss(logits, ref, ids, A, completion_mask=mask, save_kl=True)
    (g,) = torch.autograd.grad(loss.sum() + kl.sum(), logits)
    assert g.isfinite().all()
    assert (loss[1] == 0).all()
    assert (kl[1] == 0).all()
    assert (g[1] == 0).all()


def test_every_token_masked_and_no_token():
    logits, ref, ids, A = case()
    loss = fused_grpo_loss(logits, ref, ids, A, completion_mask=torch.zeros(3, 5))
    assert (loss == 0).all()
    assert (torch.autograd.grad(loss.sum(), logits)[0] == 0).all()
    assert fused_grpo_loss(logits[:, :1], ref[:, :0], ids[:, :2], A).shape == (3, 0)


def test_inplace_writes_the_gradient_over_the_logits():
    logits, ref, ids, A = case()
    held = logits * 1
    (g,) = torch.autograd.grad(fused_grpo_loss(held, ref, ids, A, inplace=True).sum(), held)
    assert torch.equal(held, g)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"logits": torch.randn(3, 13)}, "`logits`"),
        ({"ref_logp": torch.randn(3, 4)}, "`ref_logp`"),
        ({"input_ids": torch.zeros(3, 4, dtype=torch.int64)}, "`input_ids`"),
        ({"input_ids": torch.full((3, 5), 13)}, "`input_ids`"),
        ({"input_ids": torch.zeros(3, 5)}, "`input_ids`"),
        ({"advantages": torch.randn(2)}, "`advantages`"),
        ({"completion_mask": torch.ones(3, 6)}, "`completion_mask`"),
    ],
)
def test_bad_input_is_named(change: dict, name: str):
    kwargs = dict(zip(("logits", "ref_logp", "input_ids", "advantages"), case(), strict=True))
    with pytest.raises(ValueError, match=name):
        fused_grpo_loss(**{**kwargs, **change})


def test_compiles_in_one_graph():
    torch.compiler.reset()
    logits, ref, ids, A = case()
    compiled = torch.compile(fused_grpo_loss, fullgraph=True, backend="aot_eager")
    loss, expected = compiled(logits, ref, ids, A), fused_grpo_loss(logits, ref, ids, A)
    torch.testing.assert_close(loss, expected)
    (g,), (e,) = torch.autograd.grad(loss.sum(), logits), torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(g, e)


def objective(
    lp: Tensor, ref: Tensor, old: Tensor, mask: Tensor, rewards: Tensor, beta: float, epsilon: float
) -> Tensor:
    """The objective to maximise, over one token at a time."""
    A = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
    total = lp.new_zeros(())
    for b, t in mask.nonzero().tolist():
        r = torch.exp(lp[b, t] - old[b, t])
        d = ref[b, t] - lp[b, t]
        total = total + torch.minimum(A[b] * r, A[b] * r.clamp(1 - epsilon, 1 + epsilon)) - beta * (d.exp() - d - 1)
    return total / mask.sum()


@pytest.mark.parametrize(("dtype", "ratio"), [(torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_clipped_objective(dtype: torch.dtype, ratio: float):
    torch.manual_seed(0)
    ref, old = (-torch.rand(4, 7).to(dtype) for _ in range(2))
    lp = (-torch.rand(4, 9)).to(dtype).requires_grad_()
    mask = torch.rand(4, 12) > 0.3
    rewards = torch.randn(4, dtype=torch.float64)
    loss = grpo_loss_with_old_logps(lp, ref, old, mask, 7, rewards.to(dtype), 0.1, 0.3)
    lp64 = lp.detach().double().requires_grad_()
    e = -objective(lp64[:, -7:], ref.double(), old.double(), mask[:, -7:], rewards.to(dtype).double(), 0.1, 0.3)
    assert_close("loss", e, loss.double(), min(ratio, 1e-5))
    (dref,), (dgot,) = torch.autograd.grad(e, lp64), torch.autograd.grad(loss, lp)
    assert_close("dlogps", dref, dgot.double(), ratio)


def test_a_step_against_the_gradient_raises_the_rewarded_sample_n14():
    lp = torch.full((4, 3), -1.0, dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    loss = grpo_loss_with_old_logps(lp, lp, lp, torch.ones(4, 3), 3, rewards)
    # The ratio is 1 and the advantages sum to zero.
    assert loss.abs() < 1e-12
    (g,) = torch.autograd.grad(loss, lp)
    assert (g[0] < 0).all()
    assert (g[1:] > 0).all()
    A = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
    torch.testing.assert_close(g, -A[:, None].expand(4, 3) / 12)


def test_old_logps_with_every_token_masked_cost_nothing():
    lp = torch.randn(2, 3, requires_grad=True)
    loss = grpo_loss_with_old_logps(lp, lp, lp, torch.zeros(2, 3), 3, torch.tensor([1.0, 0.0]))
    assert loss == 0
    assert (torch.autograd.grad(loss, lp)[0] == 0).all()


@pytest.mark.parametrize(
    ("args", "name"),
    [
        ((torch.randn(1, 3), torch.ones(1, 3), 3, torch.ones(1)), "`logps`"),
        ((torch.randn(2, 3), torch.ones(2, 3), 4, torch.ones(2)), "`logps`"),
        ((torch.randn(2, 3), torch.ones(2, 2), 3, torch.ones(2)), "`pad_mask`"),
        ((torch.randn(2, 3), torch.ones(2, 3), 3, torch.ones(3)), "`rewards`"),
    ],
)
def test_bad_input_with_old_logps_is_named(args: tuple, name: str):
    lp, mask, keep, rewards = args
    with pytest.raises(ValueError, match=name):
        grpo_loss_with_old_logps(lp, lp, lp, mask, keep, rewards)
