# SPDX-License-Identifier: MIT
"""The Triton scan in the interpreter against the PyTorch path in float64, and its launch policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fla.backends import last_decision, use_backend
from fla.ops._common.policy import CHIPS, Launch
from fla.ops._scan.autograd import scan_backward, scan_forward
from fla.ops._scan.policy import ScanPlan, scan_plan, stretches
from fla.ops.hgrn import chunk_hgrn, fused_recurrent_hgrn
from fla.ops.hgrn.shared import hgrn

PLAN = ScanPlan(4, 2, 16, Launch(4), Launch(4))
CU = [0, 0, 3, 3, 4, 15, 40, 40]


@pytest.fixture(autouse=True)
def _seed():
    if torch.cuda.is_available():
        pytest.skip("a GPU checks the compiled kernels, in tests/gpu")
    torch.manual_seed(0)


class Pieces(torch.autograd.Function):
    """The kernels with small tiles and a given number of stretches of time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, g: Tensor, h0: Tensor | None, cu: Tensor | None, segments: int):
        o, ht = scan_forward(x, g, h0, cu, True, PLAN, segments)
        ctx.kept = g, o, h0, cu, segments
        return o, ht

    @staticmethod
    def backward(ctx: Any, do: Tensor, dht: Tensor):
        g, o, h0, cu, segments = ctx.kept
        grads = scan_backward(do.contiguous(), g, o, h0, dht.contiguous(), cu, h0 is not None, PLAN, segments)
        return *grads, None, None


def assert_matches(x: Tensor, g: Tensor, h0: Tensor | None, cu: list[int] | None, segments: int):
    offsets = None if cu is None else torch.tensor(cu)
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [t.to(dtype).requires_grad_() for t in (x, g, h0) if t is not None]
        a, b, c = leaves[0], leaves[1], leaves[2] if h0 is not None else None
        exact = dtype == torch.float64
        o, ht = hgrn(a, b, c, True, offsets) if exact else Pieces.apply(a, b, c, offsets, segments)
        torch.manual_seed(1)
        do, dht = torch.randn(o.shape, dtype=torch.float64), torch.randn(ht.shape, dtype=torch.float64)
        results.append([o, ht, *torch.autograd.grad([o, ht], leaves, [do.to(dtype), dht.to(dtype)])])
    for got, want in zip(*results, strict=True):
        assert got.isfinite().all()
        assert (got.double() - want).norm() <= 1e-5 * want.norm() + 1e-12


@pytest.mark.parametrize("D", [16, 20])
@pytest.mark.parametrize(("B", "T"), [(2, 1), (1, 30), (2, 37)])
@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("initial", [True, False])
def test_scan_in_one_or_several_stretches_of_time(D: int, B: int, T: int, segments: int, initial: bool):
    x, g = torch.randn(B, T, D), -2 * torch.rand(B, T, D)
    assert_matches(x, g, torch.randn(B, D) if initial else None, None, segments)


@pytest.mark.parametrize("segments", [1, 2, 5])
@pytest.mark.parametrize("initial", [True, False])
def test_packed_sequences_with_empty_ones_among_them(segments: int, initial: bool):
    x, g = torch.randn(1, 40, 20), -2 * torch.rand(1, 40, 20)
    assert_matches(x, g, torch.randn(7, 20) if initial else None, CU, segments)


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("low", [-float("inf"), -1000.0, -60.0])
def test_gates_that_forget_everything(segments: int, low: float):
    x, g = torch.randn(2, 37, 16), -torch.rand(2, 37, 16)
    g[:, ::5] = low
    assert_matches(x, g, torch.randn(2, 16), None, segments)


@pytest.mark.parametrize("fn", [chunk_hgrn, fused_recurrent_hgrn])
def test_the_public_ops_reach_the_kernels(fn):
    x, g = torch.randn(2, 5, 24).half(), -torch.rand(2, 5, 24).half()
    h0 = torch.randn(2, 24)
    with use_backend("triton"):
        o, ht = fn(x, g, h0, True)
        assert last_decision().backend == "triton"
        assert fn(x, g)[1] is None
        empty, kept = fn(x[:, :0], g[:, :0], h0, True)
    assert empty.shape == (2, 0, 24)
    assert torch.equal(kept, h0)
    want, state = hgrn(x.double(), g.double(), h0.double(), True, None)
    assert (o.dtype, ht.dtype) == (torch.float16, torch.float32)
    assert (o - want).norm() < 1e-3 * want.norm()
    assert (ht - state).norm() < 1e-5 * state.norm()


def test_time_is_cut_only_where_channels_leave_the_chip_idle():
    chip = CHIPS["sm90"]
    plan = scan_plan(chip, 12288, False)
    assert stretches(plan, chip, 1, 12288, 8192)[0] == 1
    for rows, D, T in ((1, 512, 8192), (2, 100, 4097), (1, 64, 70), (1, 64, 1)):
        count, span = stretches(scan_plan(chip, D, False), chip, rows, D, T)
        assert count * span >= T > (count - 1) * span
        assert span % (plan.tokens * plan.runs) == 0
    assert stretches(plan, chip, 1, 512, 8192)[0] > 8


def test_pytorch_passes_the_states_of_empty_sequences_on():
    x, g, h0 = torch.randn(1, 4, 3), -torch.rand(1, 4, 3), torch.randn(3, 3, requires_grad=True)
    o, ht = chunk_hgrn(x, g, h0, True, cu_seqlens=torch.tensor([0, 0, 4, 4]))
    assert torch.equal(ht[[0, 2]], h0[[0, 2]])
    ht.sum().backward()
    assert torch.equal(h0.grad[[0, 2]], torch.ones(2, 3))
    torch.testing.assert_close(o, chunk_hgrn(x, g, h0[1:2])[0])
