# SPDX-License-Identifier: MIT
"""The Triton paths of the helpers in the interpreter against their PyTorch bodies."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from fla.backends import use_backend
from fla.ops import utils

PACKED = [0, 0, 5, 21, 21, 64, 77]


@pytest.fixture(autouse=True)
def interpreted():
    from triton.runtime.interpreter import InterpretedFunction

    from fla.ops.utils.kernels import local_sums

    if torch.cuda.is_available() or not isinstance(local_sums, InterpretedFunction):
        pytest.skip("not in the interpreter")


def both(fn, *inputs):
    """Results and gradients on the kernels equal those in PyTorch."""
    got = []
    for name in ("triton", "torch"):
        leaves = [x.clone().requires_grad_() for x in inputs]
        with use_backend(name, strict=True):
            y = fn(*leaves)
            grads = torch.autograd.grad((y.float() * torch.arange(y.numel()).view(y.shape).cos()).sum(), leaves)
        got.append((y, *grads))
    for a, b in zip(*got, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    return got[0]


def offsets(packed):
    return torch.tensor(PACKED) if packed else None


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape", [(1, 77, 3), (1, 77, 2, 5)])
def test_running_sums(shape, reverse, packed):
    x, cu = torch.randn(shape), offsets(packed)
    both(lambda g: utils.chunk_local_cumsum(g, 16, reverse, 0.5, cu), x)
    both(lambda g: utils.chunk_global_cumsum(g, reverse, cu, 2.0), x)


def test_small_suffixes_after_a_huge_prefix():
    x = torch.full((1, 64, 1), 1e-3)
    x[:, :32] = 1e8
    with use_backend("triton", strict=True):
        y = utils.chunk_global_cumsum(x, reverse=True)
    torch.testing.assert_close(y[0, 32:, 0], torch.arange(32, 0, -1) * 1e-3)


def test_rows_of_no_sequence_are_zero():
    x, cu = torch.randn(1, 40, 3), torch.tensor([0, 3, 20])
    with use_backend("triton", strict=True):
        y = utils.chunk_local_cumsum(x, 16, cu_seqlens=cu, use_graph=True)
    assert not y[:, 20:].any()
    torch.testing.assert_close(y[:, :20], utils.chunk_local_cumsum(x[:, :20], 16, cu_seqlens=cu))


def test_softmax_and_logsumexp():
    x = torch.randn(3, 4, 50)
    both(utils.softmax_fwd, x)
    both(lambda t: utils.logsumexp_fwd(t, 0.3), x)
    with use_backend("triton", strict=True):
        torch.testing.assert_close(utils.softmax_bwd(x, x), x * (x - (x * x).sum(-1, keepdim=True)))
        top = torch.tensor([[float("inf"), 0.0], [-float("inf"), -float("inf")]])
        assert torch.equal(utils.logsumexp_fwd(top), torch.tensor([float("inf"), -float("inf")]))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("chunk", [16, 10])
def test_means_of_chunks(chunk, packed):
    cu = offsets(packed)
    both(lambda x: utils.mean_pooling(x, chunk, cu), torch.randn(1, 77, 2, 3))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_packing(side):
    cu = torch.tensor(PACKED)
    x = torch.randn(77, 2, 3)
    padded, _ = both(lambda t: utils.unpack_sequence(t, cu, side), x)
    assert torch.equal(both(lambda t: utils.pack_sequence(t, cu, side), padded)[0], x)
    with use_backend("triton", strict=True):
        ids = torch.arange(77).view(77, 1)
        assert torch.equal(utils.pack_sequence(utils.unpack_sequence(ids, cu, side), cu, side), ids)
