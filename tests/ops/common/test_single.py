# SPDX-License-Identifier: MIT
"""Autograd functions called without torch's layers in Python."""

from __future__ import annotations

import pytest
import torch

from fla.ops._common.single import applied, once


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * factor

    @staticmethod
    @once
    def backward(ctx, dy):
        return dy * ctx.factor, None


twice = applied(_Twice)


def test_results_and_gradients_are_those_of_apply():
    x = torch.randn(3, requires_grad=True)
    y = twice(x, 2.0)
    assert torch.equal(y, _Twice.apply(x, 2.0))
    assert type(y.grad_fn).__name__ == "_TwiceBackward"
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.full((3,), 2.0))


def test_no_graph_without_gradients():
    with torch.no_grad():
        assert not twice(torch.randn(3, requires_grad=True), 2.0).requires_grad
    assert not twice(torch.randn(3), 2.0).requires_grad


def test_transforms_say_that_they_are_not_supported():
    for transform in (torch.func.grad, torch.vmap):
        with pytest.raises(RuntimeError, match="setup_context"):
            transform(lambda x: twice(x, 2.0).sum())(torch.randn(3))


def _penalty(loss, x):
    (dx,) = torch.autograd.grad(loss(twice(x, 2.0)), x, create_graph=True)
    return x.sum() + dx.square().sum()


@pytest.mark.parametrize("loss", [torch.sum, lambda y: y.square().sum()])
def test_a_second_derivative_is_refused_whoever_asks(loss):
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="_TwiceBackward"):
        torch.autograd.grad(_penalty(loss, x), x)


def test_saved_tensors_are_unpacked_once():
    x, unpacked = torch.randn(3, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: unpacked.append(x) or x):
        y = twice(x, 2.0)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert torch.equal(dx, torch.full((3,), 2.0))
    assert len(unpacked) == 1


@pytest.mark.parametrize("loss", [torch.sum, lambda y: y.square().sum()])
def test_a_second_derivative_is_refused_not_dropped(loss):
    x = torch.randn(3, requires_grad=True)
    (dx,) = torch.autograd.grad(loss(twice(x, 2.0)), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (x.sum() + dx.square().sum()).backward()
