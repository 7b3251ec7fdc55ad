# SPDX-License-Identifier: MIT
"""Long convolutions against the sum over taps in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fla.modules import ImplicitLongConvolution, LongConvolution
from fla.modules.long_conv import PositionalEmbedding, fft_conv
from fla.utils import assert_close


def taps(u: Tensor, k: Tensor, k_rev: Tensor | None = None) -> Tensor:
    """``[B, D, L]`` with ``[D, taps]``, one output at a time, skip included."""
    L = u.shape[-1]
    out = []
    for t in range(L):
        y = u[..., t] + sum(k[:, j] * u[..., t - j] for j in range(min(k.shape[1], t + 1)))
        if k_rev is not None:
            y = y + sum(k_rev[:, j] * u[..., t + j] for j in range(min(k_rev.shape[1], L - t)))
        out.append(y)
    return torch.stack(out, -1)


# As many taps as inputs, fewer, and more: with 9 taps a transform of length 2 * 5 wraps into the future.
@pytest.mark.parametrize(("L", "K"), [(1, 1), (7, 7), (8, 3), (5, 9), (5, 40)])
@pytest.mark.parametrize("full", [False, True])
def test_fft_conv_and_gradients_match_the_sum_over_taps(L: int, K: int, full: bool):
    torch.manual_seed(0)
    u = torch.randn(2, 3, L, dtype=torch.float64, requires_grad=True)
    k, r = (torch.randn(3, K, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mask = torch.rand(2, 3, dtype=torch.float64)
    if full:
        y, ref, wanted = fft_conv(u, k, mask, True, r), F.gelu(taps(u, k, r)) * mask[..., None], (u, k, r)
    else:
        y, ref, wanted = fft_conv(u, k, None, False), taps(u, k), (u, k)
    assert_close("y", ref, y, 1e-10)
    dy = torch.randn_like(y)
    for e, g in zip(torch.autograd.grad(ref, wanted, dy), torch.autograd.grad(y, wanted, dy), strict=True):
        assert_close("grad", e, g, 1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtype_of_the_input_is_kept(dtype: torch.dtype):
    u, k = torch.randn(2, 3, 33).to(dtype).requires_grad_(), torch.randn(3, 33, requires_grad=True)
    y = fft_conv(u, k, None, False)
    assert y.dtype == dtype
    u64, k64 = u.detach().double().requires_grad_(), k.detach().double().requires_grad_()
    ref = taps(u64, k64)
    exact = dtype == torch.float32
    assert_close("y", ref, y.double(), 1e-5 if exact else 5e-3)
    got = torch.autograd.grad(y.double().square().sum(), (u, k))
    for e, g in zip(torch.autograd.grad(ref.square().sum(), (u64, k64)), got, strict=True):
        assert_close("grad", e, g.double(), 1e-5 if exact else 1e-2)


@pytest.mark.parametrize("L", [0, 1, 5, 9])
@pytest.mark.parametrize("kind", [LongConvolution, ImplicitLongConvolution])
def test_modules_are_causal_for_inputs_shorter_than_the_filter(kind: type, L: int):
    torch.manual_seed(0)
    module = kind(4, 9).double()
    x = torch.randn(2, L, 4, dtype=torch.float64)
    y = module(x)
    k = module.filter if kind is LongConvolution else module.filter(L)[0]
    assert y.shape == x.shape
    if not L:
        return
    assert_close("y", taps(x.transpose(1, 2), k).transpose(1, 2), y, 1e-10)
    changed = x.clone()
    changed[:, -1] += 1
    torch.testing.assert_close(module(changed)[:, :-1], y[:, :-1])


def test_an_input_longer_than_the_filter_is_filtered_with_all_taps():
    module = LongConvolution(2, 3).double()
    x = torch.randn(1, 8, 2, dtype=torch.float64)
    assert_close("y", taps(x.transpose(1, 2), module.filter).transpose(1, 2), module(x), 1e-10)


def test_positions_and_state_dict():
    module = ImplicitLongConvolution(4, 6, d_emb=5)
    assert list(module.state_dict()) == ["pos_emb.z", "mlp.0.weight", "mlp.0.bias", "mlp.2.weight", "mlp.2.bias"]
    z = PositionalEmbedding(5, 6).z
    assert not z.requires_grad
    assert z.shape == (1, 6, 5)
    w = 2 * math.pi * 2 / 6
    expected = [2 / 5, math.cos(1e-4 * w), math.cos(w), -math.sin(1e-4 * w), -math.sin(w)]
    torch.testing.assert_close(z[0, 2], torch.tensor(expected))
    assert module(torch.randn(1, 4, 4), attention_mask=None).shape == (1, 4, 4)


@pytest.mark.parametrize("d_emb", [1, 2, 4])
def test_width_of_positions_must_be_odd(d_emb: int):
    with pytest.raises(ValueError, match="`d_emb` must be odd"):
        ImplicitLongConvolution(4, 6, d_emb=d_emb)


@pytest.mark.parametrize(
    ("args", "name"),
    [
        ((torch.randn(5), torch.randn(5), None), "`u`"),
        ((torch.randn(2, 3, 5), torch.randn(4, 5), None), "`k`"),
        ((torch.randn(2, 3, 5), torch.randn(3, 5), torch.ones(3)), "`dropout_mask`"),
    ],
)
def test_bad_input_is_named(args: tuple, name: str):
    with pytest.raises(ValueError, match=name):
        fft_conv(*args)


def test_compiles_in_one_graph():
    torch.compiler.reset()
    module = LongConvolution(3, 8)
    x = torch.randn(2, 5, 3, requires_grad=True)
    y = torch.compile(module, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(y, module(x))
    got, e = torch.autograd.grad(y.square().sum(), x)[0], torch.autograd.grad(module(x).square().sum(), x)[0]
    torch.testing.assert_close(got, e)


def test_old_paths_resolve():
    import fla.modules.conv.long_conv
    import fla.modules.convolution

    assert fla.modules.conv.long_conv.LongConvolution is LongConvolution
    assert fla.modules.convolution.fft_conv is fft_conv
