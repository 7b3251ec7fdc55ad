# SPDX-License-Identifier: MIT
"""Convolution and losses inside torch.compile: one custom op each, gradients as outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fla.modules import FusedCrossEntropyLoss, FusedLinearCrossEntropyLoss, ShortConvolution
from fla.modules.fused_cross_entropy import cross_entropy_loss


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()


def compare(fn: Callable[[], Tensor | Sequence[Any]], leaves: list[Tensor]) -> None:
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")()
    eager = fn()
    torch.testing.assert_close(compiled, eager)
    outs = [
        [t for t in (o if isinstance(o, tuple) else (o,)) if isinstance(t, Tensor) and t.requires_grad]
        for o in (compiled, eager)
    ]
    grads = [torch.autograd.grad([t.square().sum() for t in o], leaves) for o in outs]
    torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.parametrize("packed", [False, True])
def test_short_convolution(packed: bool):
    torch.manual_seed(0)
    conv = ShortConvolution(6, 4, bias=True)
    x, state = torch.randn(1, 9, 6, requires_grad=True), torch.randn(1 + packed, 6, 4, requires_grad=True)
    cu = torch.tensor([0, 4, 9]) if packed else None
    leaves = [x, state, *conv.parameters()]
    compare(lambda: conv(x, cache=state, output_final_state=True, cu_seqlens=cu), leaves)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "logit_softcapping": 5.0, "lse_square_scale": 0.1}])
def test_cross_entropy(options: dict[str, float]):
    torch.manual_seed(0)
    z, target = torch.randn(7, 20, requires_grad=True), torch.randint(0, 20, (7,))
    compare(lambda: FusedCrossEntropyLoss(**options)(z, target), [z])


def test_logits_are_not_written_over_in_a_graph():
    z, target = torch.randn(7, 20, requires_grad=True), torch.randint(0, 20, (7,))
    before = z.detach().clone()
    fn = torch.compile(
        lambda: cross_entropy_loss(z, target, inplace_backward=True)[0], fullgraph=True, backend="aot_eager"
    )
    fn().sum().backward()
    assert torch.equal(z, before)
    torch.testing.assert_close(z.grad.sum(-1), torch.zeros(7), atol=1e-6, rtol=0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_linear_cross_entropy(bias: bool, frozen: bool):
    torch.manual_seed(0)
    x, w, b = (torch.randn(s, requires_grad=True) for s in ((9, 8), (30, 8), (30,)))
    target = torch.randint(0, 30, (9,))
    target[2] = -100
    w.requires_grad_(not frozen)
    loss = FusedLinearCrossEntropyLoss(use_l2warp=True)
    leaves = [t for t in (x, w, b if bias else None) if t is not None and t.requires_grad]
    compare(lambda: loss(x, target, w, b if bias else None), leaves)
