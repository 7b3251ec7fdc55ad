# SPDX-License-Identifier: MIT
"""Second and forward-mode derivatives raise; they are never taken for zero."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch.autograd import forward_ad

from fla.backends import use_backend
from fla.ops import (
    chunk_gla,
    chunk_gsa,
    chunk_linear_attn,
    chunk_rwkv6,
    chunk_simple_gla,
    fused_recurrent_gla,
    fused_recurrent_gsa,
    fused_recurrent_rwkv6,
    fused_recurrent_simple_gla,
)  # fmt: skip
from fla.ops.hgrn import chunk_hgrn
from fla.ops.utils import softmax_fwd

BACKENDS = ["torch", *(["triton"] if importlib.util.find_spec("triton") else [])]


def _calls():
    gen = torch.Generator().manual_seed(0)
    rn = lambda *shape: torch.randn(*shape, generator=gen)
    q, k, v, gates = rn(1, 20, 2, 16), rn(1, 20, 2, 16), rn(1, 20, 2, 16), -rn(1, 20, 2, 16).abs()
    return {
        "simple_gla": (chunk_simple_gla, (q, k, v, gates[..., 0].contiguous())),
        "gla": (chunk_gla, (q, k, v, gates)),
        "normalised linear_attn": (chunk_linear_attn, (q.abs(), k.abs(), v)),
        "rwkv6": (chunk_rwkv6, (q, k, v, gates, rn(2, 16))),
        "gsa": (chunk_gsa, (q, k, v, rn(1, 20, 2, 16))),
        "hgrn": (chunk_hgrn, (q.flatten(2), gates.flatten(2))),
    }


CALLS = _calls()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", list(CALLS))
def test_a_penalty_on_gradients_of_a_sum_raises(name, backend):
    fn, args = CALLS[name]
    leaves = [x.clone().requires_grad_() for x in args]
    with use_backend(backend):
        o = fn(*leaves)[0]
        grads = torch.autograd.grad(o.sum(), leaves, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            (o.sum() + sum(x.square().sum() for x in grads)).backward()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", list(CALLS))
def test_forward_mode_raises(name, backend):
    fn, (first, *rest) = CALLS[name]
    with use_backend(backend), forward_ad.dual_level(), pytest.raises(NotImplementedError):
        fn(forward_ad.make_dual(first, torch.ones_like(first)), *rest)


@pytest.mark.skipif("triton" not in BACKENDS, reason="needs triton")
def test_forward_mode_raises_token_by_token():
    calls = {"simple_gla": fused_recurrent_simple_gla, "gla": fused_recurrent_gla, "rwkv6": fused_recurrent_rwkv6}
    for name, fn in {**calls, "gsa": fused_recurrent_gsa}.items():
        first, *rest = (x[:, :9] if x.dim() > 2 else x for x in CALLS[name][1])
        with use_backend("triton"), forward_ad.dual_level(), pytest.raises(NotImplementedError):
            fn(forward_ad.make_dual(first, torch.ones_like(first)), *rest)


@pytest.mark.parametrize("backend", BACKENDS)
def test_helpers_keep_tangents(backend):
    x = torch.randn(3, 7)
    with use_backend(backend), forward_ad.dual_level():
        p, want = (f(forward_ad.make_dual(x, x.cos())) for f in (softmax_fwd, lambda x: x.softmax(-1)))
        assert torch.allclose(forward_ad.unpack_dual(p).tangent, forward_ad.unpack_dual(want).tangent, atol=1e-6)
