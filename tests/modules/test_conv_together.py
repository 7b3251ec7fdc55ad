# SPDX-License-Identifier: MIT
"""A decoding step of three convolutions at once is the step of each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fla.backends import use_backend
from fla.modules import ShortConvolution
from fla.modules.causal_conv1d import causal_conv1d_update, together
from fla.modules.causal_conv1d.together import causal_conv1d_updates, step_together
from fla.ops._common.checks import ArgumentError
from fla.utils import assert_close

WIDTHS = (40, 40, 300)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    ("N", "W", "bias", "activation"), [(3, 4, True, "silu"), (1, 3, False, None), (5, 2, True, None)]
)
def test_each_convolution_takes_its_step(backend: str, N: int, W: int, bias: bool, activation: str | None):
    if backend == "triton":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("compiled kernels have their own lane")
    torch.manual_seed(0)
    xs = [torch.randn(N, 1, 2 * D)[..., :D] for D in WIDTHS]  # rows that are apart
    caches, weights = [torch.randn(N, D, W) for D in WIDTHS], [torch.randn(D, 1, W) for D in WIDTHS]
    biases = [torch.randn(D) if bias else None for D in WIDTHS]
    ours = [c.clone() for c in caches]
    with use_backend(backend, strict=True):
        ys = causal_conv1d_updates(*xs, *ours, *weights, *biases, activation)
    for x, y, cache, mine, w, b in zip(xs, ys, caches, ours, weights, biases, strict=True):
        ref, state = causal_conv1d_update(x, cache, None, w, b, activation)
        assert_close("y", ref, y, 1e-6)
        assert torch.equal(state, mine)


def test_caches_of_different_numbers_of_sequences_are_refused_before_any_is_written():
    xs, weights = [torch.randn(2, 1, 4) for _ in range(3)], [torch.randn(4, 3) for _ in range(3)]
    caches = [torch.zeros(2, 4, 3), torch.zeros(2, 4, 3), torch.zeros(1, 4, 3)]
    with pytest.raises(ArgumentError, match="cache"):
        causal_conv1d_updates(*xs, *caches, *weights)
    assert not any(c.any() for c in caches)


@pytest.mark.parametrize("packed", [False, True])
def test_modules_that_are_plain_and_alike_go_together(packed: bool, monkeypatch: pytest.MonkeyPatch):
    convs = [ShortConvolution(D, 4) for D in WIDTHS]
    xs = [torch.randn(*((1, 3) if packed else (3, 1)), D) for D in WIDTHS]
    cu = torch.arange(4, dtype=torch.int32) if packed else None
    caches = [torch.randn(3, D, 4) for D in WIDTHS]
    with torch.no_grad():
        refs = [conv(x, cache=c.clone(), cu_seqlens=cu)[0] for conv, x, c in zip(convs, xs, caches, strict=True)]
        assert step_together(tuple(convs), tuple(xs), caches, cu, None) is None  # on the CPU nothing is gained
        monkeypatch.setattr(together, "_on_host", lambda x: False)
        ys: Any = step_together(tuple(convs), tuple(xs), [c.clone() for c in caches], cu, None)
        for ref, y in zip(refs, ys, strict=True):
            assert_close("y", ref, y, 1e-6)
        long = tuple(torch.randn(3, 2, D) for D in WIDTHS)
        assert step_together(tuple(convs), long, caches, None, None) is None
        other = (convs[0], convs[1], ShortConvolution(300, 4, activation=None))
        assert step_together(other, tuple(xs), caches, cu, None) is None
        hooked = (*convs[:2], ShortConvolution(300, 4))
        hooked[2].register_forward_hook(lambda *a: None)
        assert step_together(hooked, tuple(xs), caches, cu, None) is None
        assert step_together((*convs[:2], nn.Identity()), tuple(xs), caches, cu, None) is None
    assert step_together(tuple(convs), tuple(xs), caches, cu, None) is None  # under autograd
