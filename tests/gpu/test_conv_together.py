# SPDX-License-Identifier: MIT
"""The launch that takes the decoding step of three convolutions, compiled."""

from __future__ import annotations

import pytest
import torch

from fla.backends import use_backend
from fla.modules.causal_conv1d import causal_conv1d_update
from fla.modules.causal_conv1d.together import causal_conv1d_updates
from fla.utils import assert_close

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("N", "widths", "bias"), [(1, (1024, 1024, 1024), False), (64, (768, 768, 1536), False), (3, (40, 40, 300), True)]
)
def test_each_convolution_takes_its_step(dtype: torch.dtype, N: int, widths: tuple[int, ...], bias: bool):
    torch.manual_seed(0)
    xs = [torch.randn(N, 1, 2 * D)[..., :D].to(dtype) for D in widths]
    caches = [torch.randn(N, D, 4).to(dtype) for D in widths]
    weights = [torch.randn(D, 1, 4).to(dtype) for D in widths]
    biases = [torch.randn(D).to(dtype) if bias else None for D in widths]
    ours = [c.cuda() for c in caches]
    inputs, parameters = [x.cuda() for x in xs], [None if p is None else p.cuda() for p in (*weights, *biases)]
    with use_backend("triton", strict=True):
        ys = causal_conv1d_updates(*inputs, *ours, *parameters, "silu")
    for x, y, cache, mine, w, b in zip(xs, ys, caches, ours, weights, biases, strict=True):
        exact = [None if t is None else t.double() for t in (x, cache, w, b)]
        ref, _ = causal_conv1d_update(exact[0], exact[1], None, exact[2], exact[3], "silu")
        assert_close("y", ref.float(), y.cpu().float(), 5e-3 if dtype == torch.bfloat16 else 1e-5)
        assert torch.equal(exact[1].to(dtype), mine.cpu())
