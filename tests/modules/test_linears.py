# SPDX-License-Identifier: MIT
"""Linear layers on one input: joined, they compute what each computes alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fla.modules._linears import joinable, joined, linears
from fla.utils import assert_close


def three(dtype: torch.dtype = torch.float32) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(16, 24, bias=False), nn.Linear(16, 5), nn.Linear(16, 16, bias=False)]).to(dtype)


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_joined_layers_give_the_outputs_and_gradients_of_each(dtype: torch.dtype, autocast: bool):
    if autocast and dtype != torch.float32:
        pytest.skip("autocast is for float32")
    layers = three(dtype)
    again = copy.deepcopy(layers)
    x = torch.randn(2, 7, 16, dtype=dtype)
    x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours, wanted = joined(x1, list(layers)), [layer(x2) for layer in again]
    limit = 1e-2 if autocast or dtype == torch.bfloat16 else 1e-6
    for mine, other in zip(ours, wanted, strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)
    for outputs in (ours, wanted):
        sum((o.float() ** 2).sum() for o in outputs).backward()
    assert_close("dx", x2.grad.float(), x1.grad.float(), limit)
    for (name, p), q in zip(again.named_parameters(), layers.parameters(), strict=True):
        assert q.grad.dtype == p.grad.dtype
        assert_close(name, p.grad.float(), q.grad.float(), limit)


def test_outputs_that_nobody_uses_and_frozen_weights_have_no_gradient():
    layers = three()
    layers[0].weight.requires_grad_(False)
    x = torch.randn(3, 16, requires_grad=True)
    first, second, _ = joined(x, list(layers))
    (first.sum() + second.sum()).backward()
    assert layers[0].weight.grad is None
    assert layers[2].weight.grad is None
    assert_close("dx", (layers[0].weight.sum(0) + layers[1].weight.sum(0)).expand(3, 16), x.grad, 1e-6)
    assert_close("bias", torch.full((5,), 3.0), layers[1].bias.grad, 1e-6)


def test_layers_that_are_more_than_their_weights_are_called():
    layers, x = three(), torch.randn(2, 16, requires_grad=True)
    assert not joinable(x, list(layers))  # on the CPU nothing is gained
    on_device = torch.empty(2, 16, device="meta", requires_grad=True)
    assert not joinable(on_device, list(layers))
    seen = []
    layers[1].register_forward_hook(lambda module, inputs, output: seen.append(output))
    outputs = linears(x, list(layers))
    assert seen[0] is outputs[1]
