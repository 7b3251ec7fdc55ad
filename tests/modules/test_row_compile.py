# SPDX-License-Identifier: MIT
"""Norms, activations and rotary embeddings under torch.compile: one graph, the results of eager calls."""

from __future__ import annotations

import pytest
import torch

from fla.modules import FusedRMSNormGated, GroupNorm, LayerNormLinear, RMSNorm, RotaryEmbedding
from fla.modules.activations import logsigmoid, powglu, swiglu, swiglu_linear
from fla.modules.norm import FusedLayerNormSwishGateLinear
from fla.modules.norm.l2norm import l2norm
from fla.modules.token_shift import token_shift


def rn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


GROUPS = GroupNorm(2, 8)

CASES = {
    "rms": (RMSNorm(8), (rn(3, 8),)),
    "stream": (lambda x, r: GROUPS(x, r, prenorm=True), (rn(3, 8), rn(3, 8))),
    "gated": (FusedRMSNormGated(8), (rn(3, 8), rn(3, 8))),
    "norm linear": (LayerNormLinear(8), (rn(3, 8), rn(4, 8), rn(4))),
    "gated linear": (FusedLayerNormSwishGateLinear(8), (rn(3, 8), rn(3, 8), rn(4, 8))),
    "l2": (l2norm, (rn(3, 8),)),
    "logsigmoid": (logsigmoid, (rn(3, 8),)),
    "swiglu": (swiglu, (rn(3, 8), rn(3, 8))),
    "powglu": (powglu, (rn(3, 8), rn(3, 8))),
    "swiglu linear": (swiglu_linear, (rn(3, 8), rn(3, 8), rn(4, 8), rn(4))),
    "rotary": (RotaryEmbedding(8), (rn(1, 3, 2, 8), rn(1, 3, 1, 8))),
    "token shift": (token_shift, (rn(2, 3, 8),)),
}


@pytest.mark.parametrize("name", list(CASES))
def test_compiled_calls_equal_eager_ones(name: str):
    torch.compiler.reset()
    fn, inputs = CASES[name]
    results = []
    for run in (fn, torch.compile(fn, fullgraph=True, backend="aot_eager")):
        out = run(*inputs)
        out = out if isinstance(out, tuple) else (out,)
        results.append([*out, *torch.autograd.grad(sum(o.square().sum() for o in out), inputs)])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)
