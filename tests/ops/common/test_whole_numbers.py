# SPDX-License-Identifier: MIT
"""A number of the caller's reaches kernels as a float, also where the caller wrote ``scale=1``.

A compiled kernel is looked up by dtypes and constexprs. Triton compiles ``1`` into a kernel as a constant and ``2`` as
an integer argument: that kernel would be wrong for every other call of these sizes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import torch.nn.functional as F

from fla.backends import use_backend
from fla.ops._common.launch import Fixed
from fla.ops.comba import chunk_comba, fused_recurrent_comba
from fla.ops.delta_rule import chunk_delta_rule, fused_recurrent_delta_rule
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from fla.ops.gdn2 import chunk_gdn2, fused_recurrent_gdn2
from fla.ops.gla import chunk_gla, fused_recurrent_gla
from fla.ops.kda import chunk_kda, fused_recurrent_kda
from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd
from fla.ops.linear_attn import chunk_linear_attn, fused_recurrent_linear_attn
from fla.ops.retention import chunk_retention, fused_recurrent_retention
from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

FLOATS = {"scale", "unscale", "lower", "lower_bound", "beta_scale", "beta_inv", "eps"}
T, H, D = 5, 1, 16


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], set[type]]:
    """Types of the numbers that kernels were launched with, by kernel and parameter."""
    types: dict[tuple[str, str], set[type]] = {}
    launch = Fixed.__call__

    def watched(self: Fixed, grid: int, args: tuple[Any, ...], given: tuple[Any, ...]) -> None:
        for name, x in zip(self.fn.arg_names, args, strict=False):
            if name in FLOATS:
                types.setdefault((self.fn.__name__, name), set()).add(type(x))
        launch(self, grid, args, given)

    monkeypatch.setattr(Fixed, "__call__", watched)
    return types


def inputs(vector: bool) -> tuple[torch.Tensor, ...]:
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, T, H, D, generator=gen) for _ in range(3))
    g = F.logsigmoid(torch.randn(1, T, H, *((D,) if vector else ()), generator=gen))
    return q, F.normalize(k, dim=-1), v, g, torch.rand(1, T, H, generator=gen)


def calls() -> dict[str, Any]:
    _, k, v, g, beta = inputs(False)
    gk, ones = inputs(True)[3], torch.ones(1, T, H, D)
    gate = {"use_gate_in_kernel": True, "A_log": torch.zeros(H), "lower_bound": -5}
    return {
        "gdn": lambda fn, x: fn(q=x, k=k, v=v, g=g, beta=beta, scale=1),
        "delta": lambda fn, x: fn(q=x, k=k, v=v, beta=beta, scale=1),
        "comba": lambda fn, x: fn(q=x, k=k, v=v, p=k, g=g, beta=beta, scale=1),
        "kda": lambda fn, x: fn(q=x, k=k, v=v, g=gk, beta=beta, scale=1, **gate),
        "kda_fwd": lambda fn, x: fn(q=x, k=k, v=v, g=gk, beta=beta, scale=1, inplace_final_state=False, **gate),
        "gdn2": lambda fn, x: fn(q=x, k=k, v=v, g=gk, b=ones, w=ones, scale=1, **gate),
        "simple_gla": lambda fn, x: fn(q=x, k=k, v=v, g=g, scale=1),
        "gla": lambda fn, x: fn(x, k, v, gk, scale=1),
        "plain": lambda fn, x: fn(q=x, k=k, v=v, scale=1),
        "normalized": lambda fn, x: fn(q=x, k=k, v=v, scale=1, normalize=True),
    }


CASES = [
    ("gdn", chunk_gated_delta_rule), ("gdn", fused_recurrent_gated_delta_rule), ("delta", chunk_delta_rule),
    ("delta", fused_recurrent_delta_rule), ("comba", chunk_comba), ("comba", fused_recurrent_comba),
    ("kda", chunk_kda), ("kda", fused_recurrent_kda), ("kda_fwd", fused_recurrent_kda_fwd), ("gdn2", chunk_gdn2),
    ("gdn2", fused_recurrent_gdn2), ("simple_gla", chunk_simple_gla), ("simple_gla", fused_recurrent_simple_gla),
    ("gla", chunk_gla), ("gla", fused_recurrent_gla), ("plain", chunk_retention), ("plain", fused_recurrent_retention),
    ("plain", chunk_linear_attn), ("plain", fused_recurrent_linear_attn), ("normalized", chunk_linear_attn),
    ("normalized", fused_recurrent_linear_attn),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fn"), CASES, ids=[f"{name}-{fn.__name__}" for name, fn in CASES])
def test_whole_numbers_reach_kernels_as_floats(name, fn, seen):
    # The recurrent forms have kernels of their own for inference alone.
    train = "chunk" in fn.__name__
    q = inputs(False)[0].requires_grad_(train)
    with use_backend("triton", strict=True):
        o = calls()[name](fn, q)[0]
        if train:
            o.sum().backward()
    assert seen
    assert all(types == {float} for types in seen.values()), seen
