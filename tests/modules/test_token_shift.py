# SPDX-License-Identifier: MIT
"""Token shift against a loop over tokens in float64, with caches, packed and empty sequences."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fla.modules import TokenShift
from fla.modules.token_shift import prepare_maxlens, token_shift, token_shift_ref
from fla.utils import assert_close


def loop(x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
    out = []
    for row in x:
        out.append(cache - row)
        cache = row
    return torch.stack(out) if out else x, cache


@pytest.mark.parametrize("T", [0, 1, 2, 9])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_output_cache_and_gradients_match_the_token_loop(T: int, packed: bool, dtype: torch.dtype):
    torch.manual_seed(0)
    if packed:
        cu = torch.tensor([0, 0, min(1, T), min(1, T), T, T], dtype=torch.int32)
        bounds = [(0, int(a), int(b)) for a, b in itertools.pairwise(cu)]
    else:
        cu, bounds = None, [(0, 0, T), (1, 0, T)]
    x = torch.randn(1 if packed else 2, T, 5, dtype=dtype, requires_grad=True)
    cache = torch.randn(len(bounds), 5, dtype=dtype, requires_grad=True)
    y, out = token_shift(x, cu, cache, output_cache=True)
    assert y.dtype == out.dtype == dtype
    x64, cache64 = (t.detach().double().requires_grad_() for t in (x, cache))
    parts = [loop(x64[b, start:end], cache64[n]) for n, (b, start, end) in enumerate(bounds)]
    ref, ref_out = torch.cat([p[0] for p in parts]).view_as(x64), torch.stack([p[1] for p in parts])
    fwd, grad = {torch.float64: (1e-12, 1e-12), torch.float32: (1e-6, 1e-6)}.get(dtype, (5e-3, 1e-2))
    assert_close("y", ref, y.double(), fwd)
    assert torch.equal(out.double(), ref_out)
    dy, dout = torch.randn_like(y), torch.randn_like(out)
    got = torch.autograd.grad([y, out], [x, cache], [dy, dout])
    for e, g in zip(
        torch.autograd.grad([ref, ref_out], [x64, cache64], [dy.double(), dout.double()]), got, strict=True
    ):
        assert_close("grad", e, g.double(), grad)


def test_without_a_cache_the_first_token_follows_zeros():
    x = torch.randn(1, 7, 3)
    cu = torch.tensor([0, 3, 3, 7])
    assert torch.equal(token_shift(x), token_shift_ref(x))
    assert torch.equal(token_shift(x, cu), token_shift_ref(x, cu))
    assert torch.equal(token_shift(x)[:, 0], -x[:, 0])
    assert prepare_maxlens(cu) == 4


def test_two_halves_with_the_cache_between_them_equal_the_whole():
    x = torch.randn(2, 8, 3)
    a, cache = token_shift(x[:, :5], output_cache=True)
    assert torch.equal(torch.cat([a, token_shift(x[:, 5:], cache=cache[:, None])], 1), token_shift(x))


def test_the_returned_cache_is_a_copy_and_the_given_one_stays():
    x, cache = torch.randn(1, 4, 3), torch.randn(1, 3)
    before = cache.clone()
    _, out = token_shift(x, cache=cache, output_cache=True)
    out.zero_()
    assert torch.equal(cache, before)
    assert x[:, -1].abs().sum() > 0


def test_the_function_class_always_returns_a_pair_and_passes_gradcheck():
    x = torch.randn(1, 4, 2, dtype=torch.float64, requires_grad=True)
    y, out = TokenShift.apply(x, None, None, False, None)
    assert torch.equal(y, token_shift(x))
    assert out is None
    cu, cache = torch.tensor([0, 0, 1, 4]), torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, c: token_shift(x, cu, c, True), (x, cache))


def test_expanded_gradients_and_strided_input():
    x = torch.randn(2, 3, 6).transpose(0, 1)[..., ::2].requires_grad_()
    token_shift(x).sum().backward()
    assert x.grad is not None
    # Inner tokens are added once and subtracted once.
    assert torch.equal(x.grad[:, :-1], torch.zeros_like(x.grad[:, :-1]))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"x": torch.randn(4, 3)}, "`x`"),
        ({"x": torch.zeros(1, 4, 3, dtype=torch.int64)}, "`x`"),
        ({"x": torch.randn(2, 4, 3), "cu_seqlens": torch.tensor([0, 4])}, "batch size"),
        ({"x": torch.randn(1, 4, 3), "cu_seqlens": torch.tensor([0, 5])}, "cu_seqlens"),
        ({"x": torch.randn(2, 4, 3), "cache": torch.randn(1, 3)}, "`cache`"),
    ],
)
def test_bad_input_is_named(kwargs: dict, message: str):
    with pytest.raises((ValueError, TypeError), match=message):
        token_shift(**kwargs)


def test_compiles_in_one_graph():
    torch.compiler.reset()
    x, cache = torch.randn(1, 5, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    cu = torch.tensor([0, 2, 5])
    fn = torch.compile(lambda x, c: token_shift(x, cu, c, True), fullgraph=True, backend="aot_eager")
    y, out = fn(x, cache)
    ref, ref_out = token_shift(x, cu, cache, True)
    assert torch.equal(y, ref)
    assert torch.equal(out, ref_out)
    got = torch.autograd.grad(y.square().sum() + out.sum(), (x, cache))
    for e, g in zip(torch.autograd.grad(ref.square().sum() + ref_out.sum(), (x, cache)), got, strict=True):
        assert_close("grad", e, g, 1e-6)
