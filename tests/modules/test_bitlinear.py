# SPDX-License-Identifier: MIT
"""BitNet's linear layers against the formula in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fla.modules import BitLinear, FusedBitLinear
from fla.modules.fused_bitlinear import (
    activation_quant,
    bit_linear,
    layer_norm_linear_quant,
    rms_norm_linear_quant,
    weight_quant,
)
from fla.utils import assert_close


def quant_x(x: Tensor) -> Tensor:
    c = 127 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    return (x * c).round().clamp(-128, 127) / c


def quant_w(w: Tensor) -> Tensor:
    a = 1 / w.abs().mean().clamp(min=1e-5)
    return (w * a).round().clamp(-1, 1) / a


def through(x: Tensor, q: Tensor) -> Tensor:
    return x + (q - x).detach()


def formula(
    x: Tensor, nw: Tensor | None, nb: Tensor | None, W: Tensor, b: Tensor | None, eps: float, rms: bool
) -> Tensor:
    s = x if rms else x - x.mean(-1, keepdim=True)
    y = s / (s.square().mean(-1, keepdim=True) + eps).sqrt()
    y = y if nw is None else y * nw
    y = y if nb is None else y + nb
    return F.linear(through(y, quant_x(y)), through(W, quant_w(W)), b)


@pytest.mark.parametrize("shape", [(1, 1, 7), (2, 3, 50), (5, 8), (0, 8)])
@pytest.mark.parametrize("rms", [True, False])
@pytest.mark.parametrize("full", [True, False])
def test_output_residual_stream_and_gradients(shape: tuple[int, ...], rms: bool, full: bool):
    torch.manual_seed(0)
    D = shape[-1]
    x, r = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(2))
    nw, nb, b = (torch.randn(n, dtype=torch.float64, requires_grad=True) for n in (D, D, 5))
    W = torch.randn(5, D, dtype=torch.float64, requires_grad=True)
    fn = rms_norm_linear_quant if rms else layer_norm_linear_quant
    if full:
        wanted = (x, nw, nb, W, b, r)
        out = fn(x, nw, nb, W, b, r, 1e-6, True)
        ref = (formula(x + r, nw, nb, W, b, 1e-6, rms), x + r)
    else:
        wanted = (x, W)
        out, ref = (fn(x, None, None, W, None, eps=1e-6),), (formula(x, None, None, W, None, 1e-6, rms),)
    for e, o in zip(ref, out, strict=True):
        assert_close("out", e, o, 1e-10)
    seeds = [torch.randn_like(e) for e in ref]
    for e, g in zip(torch.autograd.grad(ref, wanted, seeds), torch.autograd.grad(out, wanted, seeds), strict=True):
        assert_close("grad", e, g, 1e-10)


@pytest.mark.parametrize("kind", [BitLinear, FusedBitLinear])
@pytest.mark.parametrize("bias", [False, True])
def test_modules_add_their_bias(kind: type, bias: bool):
    torch.manual_seed(0)
    layer = kind(9, 4, bias=bias)
    assert list(layer.state_dict()) == (["weight", "bias", "norm.weight"] if bias else ["weight", "norm.weight"])
    assert isinstance(layer, torch.nn.Linear)
    assert layer.norm.eps == 1e-8
    x = torch.randn(3, 9)
    W, nw = layer.weight.detach().double(), layer.norm.weight.detach().double()
    b = layer.bias.detach().double() if bias else None
    assert_close("y", formula(x.double(), nw, None, W, b, 1e-8, True), layer(x).double(), 1e-5)
    if bias:
        (g,) = torch.autograd.grad(layer(x).sum(), layer.bias)
        assert torch.equal(g, torch.full_like(g, 3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision(dtype: torch.dtype):
    torch.manual_seed(0)
    x, W = (torch.randn(n, 64).to(dtype).requires_grad_() for n in (33, 16))
    nw = torch.rand(64, requires_grad=True)
    y = bit_linear(x, W, None, nw)
    assert y.dtype == dtype
    args = [t.detach().double().requires_grad_() for t in (x, W, nw)]
    ref = formula(args[0], args[2], None, args[1], None, 1e-8, True)
    exact = dtype == torch.float32
    assert_close("y", ref, y.double(), 1e-5 if exact else 5e-3)
    dy = torch.randn_like(y)
    for e, g, t in zip(
        torch.autograd.grad(ref, args, dy.double()), torch.autograd.grad(y, (x, W, nw), dy), (x, W, nw), strict=True
    ):
        assert g.dtype == t.dtype
        assert_close("grad", e, g.double(), 1e-5 if exact else 1e-2)


def test_quantised_values():
    w = torch.tensor([[0.2, -3.0], [1.0, 0.0]])
    torch.testing.assert_close(weight_quant(w), torch.tensor([[0.0, -1.0], [1.0, 0.0]]) * 1.05)
    x = torch.tensor([[127.0, -2.6, 0.4], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(activation_quant(x), torch.tensor([[127.0, -3.0, 0.0], [0.0, 0.0, 0.0]]))
    assert weight_quant(w.bfloat16()).dtype == activation_quant(x.half().bfloat16()).dtype == torch.bfloat16
    assert weight_quant(torch.zeros(2, 2)).eq(0).all()


@pytest.mark.parametrize(
    ("args", "name"),
    [
        ((torch.randn(3, 8), torch.randn(4, 7)), "`linear_weight`"),
        ((torch.randn(3, 8), torch.randn(4, 8), torch.randn(5)), "`linear_bias`"),
        ((torch.randn(3, 8), torch.randn(4, 8), None, torch.randn(7)), "`weight`"),
    ],
)
def test_bad_input_is_named(args: tuple, name: str):
    with pytest.raises(ValueError, match=name):
        bit_linear(*args)


def test_compiles_in_one_graph():
    torch.compiler.reset()
    layer, x = BitLinear(8, 4, bias=True), torch.randn(3, 8, requires_grad=True)
    y = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(y, layer(x))
    (g,), (e,) = torch.autograd.grad(y.square().sum(), x), torch.autograd.grad(layer(x).square().sum(), x)
    torch.testing.assert_close(g, e)
