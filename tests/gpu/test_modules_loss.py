# SPDX-License-Identifier: MIT
"""The losses on a GPU: every case of benchmarks/modules/losses.py, memory, compile."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import losses

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", list(losses.CASES))
def test_losses_and_gradients_match_float64_and_repeat_bit_for_bit(name: str):
    assert losses.check(name)[0] == []


def test_memory_of_the_linear_loss_is_its_gradients_and_a_chunk_of_logits():
    from fla.modules import FusedLinearCrossEntropyLoss

    N, H, V = 4096, 512, 65536
    x, w = (torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in ((N, H), (V, H)))
    target = torch.randint(0, V, (N,), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    FusedLinearCrossEntropyLoss(accumulate_grad_in_fp32=False)(x, target, w).backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 2 * (N * H + V * H) + (256 << 20) + (8 << 20)
    with torch.no_grad():
        FusedLinearCrossEntropyLoss()(x, target, w)


@pytest.mark.parametrize("kind", ["cross entropy", "linear", "divergence"])
def test_compiled_training_equals_eager(kind: str):
    from fla.modules.fused_cross_entropy import cross_entropy_loss
    from fla.modules.fused_kl_div import fused_kl_div_loss
    from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss

    torch.manual_seed(0)
    x, w = (torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in ((64, 256), (1000, 256)))
    target = torch.randint(0, 1000, (64,), device="cuda")
    fn = {
        "cross entropy": lambda: cross_entropy_loss(x @ w.t(), target)[0].mean(),
        "linear": lambda: fused_linear_cross_entropy_loss(x, target, w),
        "divergence": lambda: fused_kl_div_loss(x, x.detach(), w, w.detach().flip(0)),
    }[kind]
    loss = fn()
    want = torch.autograd.grad(loss, (x, w))
    again = torch.compile(fn, fullgraph=True)()
    torch.testing.assert_close(again, loss)
    for a, b in zip(torch.autograd.grad(again, (x, w)), want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)
