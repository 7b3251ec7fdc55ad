# SPDX-License-Identifier: MIT
"""The short convolution on a GPU: every case of benchmarks/modules/conv.py, capture, compile."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import conv

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", list(conv.CASES))
def test_outputs_and_gradients_match_float64_and_repeat_bit_for_bit(name: str):
    assert conv.check(name) == []


def test_a_decoding_step_updates_the_cache():
    assert conv.check_update() == []


def test_offsets_beyond_32_bits():
    assert conv.check_large() == []


def test_compiled_with_cuda_graphs_nothing_is_overwritten_while_in_use():
    from fla.modules import ShortConvolution

    torch.manual_seed(0)
    module = ShortConvolution(64, 4).to("cuda", torch.bfloat16)
    compiled = torch.compile(lambda t: module(t)[0], mode="reduce-overhead")
    for _ in range(4):
        x = torch.randn(2, 50, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        torch.compiler.cudagraph_mark_step_begin()
        (got,) = torch.autograd.grad(compiled(x).square().sum(), x)
        (want,) = torch.autograd.grad(module(x)[0].square().sum(), x)
        torch.testing.assert_close(got, want)


def test_a_captured_module_replays_on_new_values_and_offsets():
    from fla.modules import ShortConvolution

    conv1d = ShortConvolution(64, 4, bias=True).to("cuda", torch.bfloat16)
    x = torch.randn(1, 100, 64, device="cuda", dtype=torch.bfloat16)
    cu = torch.tensor([0, 40, 100], device="cuda")
    with torch.no_grad():
        conv1d(x, cu_seqlens=cu, output_final_state=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, state = conv1d(x, cu_seqlens=cu, output_final_state=True)
        x.copy_(torch.randn_like(x))
        cu.copy_(torch.tensor([0, 3, 100], device="cuda"))
        graph.replay()
        again = conv1d(x, cu_seqlens=cu, output_final_state=True)
    assert torch.equal(y, again[0])
    assert torch.equal(state, again[1])


def test_compiled_training_equals_eager():
    from fla.modules import ShortConvolution

    torch.manual_seed(0)
    module = ShortConvolution(64, 4, bias=True).to("cuda", torch.bfloat16)
    x = torch.randn(2, 50, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    leaves = [x, *module.parameters()]
    y = module(x)[0]
    want = torch.autograd.grad(y, leaves, dy)
    z = torch.compile(lambda t: module(t)[0], fullgraph=True)(x)
    assert torch.equal(z, y)
    for a, b in zip(torch.autograd.grad(z, leaves, dy), want, strict=True):
        assert torch.equal(a, b)
