# SPDX-License-Identifier: MIT
"""The adapter for the package causal-conv1d, with a stub of it: which calls it takes, and what it hands over.

The stub computes what the package documents, channels first, so that a wrong layout or state shows.
"""

from __future__ import annotations

import sys
import types

import pytest
import torch
import torch.nn.functional as F

from fla.backends import explain, last_decision, refresh
from fla.modules import ShortConvolution
from fla.modules.causal_conv1d import causal_conv1d
from fla.modules.causal_conv1d.backends.cuda import causal_conv1d_cuda, fast_causal_conv1d_fn
from fla.modules.causal_conv1d.library import CausalConv1d
from fla.utils import assert_close


def stub(x, weight, bias=None, seq_idx=None, initial_states=None, activation=None):
    (B, D, T), W = x.shape, weight.shape[1]
    assert x.stride(1) == 1
    assert not x.stride(2) % 8
    if initial_states is not None:
        assert seq_idx is None
        assert initial_states.shape == (B, D, W - 1)
        assert initial_states.stride(1) == 1
    past = x.new_zeros(B, D, W - 1) if initial_states is None else initial_states
    if seq_idx is None:
        p = F.conv1d(torch.cat([past, x], 2), weight[:, None], bias, groups=D)
    else:
        assert seq_idx.shape == (B, T)
        assert seq_idx.dtype == torch.int32
        parts = [x[:, :, seq_idx[0] == n] for n in seq_idx[0].unique()]
        p = torch.cat([F.conv1d(torch.cat([past, u], 2), weight[:, None], bias, groups=D) for u in parts], 2)
    return F.silu(p) if activation in ("silu", "swish") else p


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch):
    module = types.ModuleType("causal_conv1d")
    module.causal_conv1d_fn = stub  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "causal_conv1d", module)
    # The stub runs anywhere; the package needs CUDA.
    monkeypatch.setattr(CausalConv1d, "capability", None)
    refresh()
    yield module
    monkeypatch.undo()
    refresh()


def test_it_is_known_and_not_there():
    verdicts = explain(causal_conv1d, torch.zeros(1, 4, 8), torch.zeros(8, 4))
    assert "causal_conv1d" in str(verdicts)


@pytest.mark.parametrize("kwargs", [{}, {"cu": True}, {"state": True}, {"state": True, "res": True, "bias": True}])
@pytest.mark.usefixtures("library")
def test_results_and_gradients_equal_ours(kwargs: dict[str, bool]):
    torch.manual_seed(0)
    leaves = {"x": torch.randn(1, 9, 8), "weight": torch.randn(8, 4)}
    if kwargs.get("state"):
        leaves["initial_state"] = torch.randn(1, 8, 4)
    if kwargs.get("res"):
        leaves["residual"] = torch.randn(1, 9, 8)
    if kwargs.get("bias"):
        leaves["bias"] = torch.randn(8)
    for t in leaves.values():
        t.requires_grad_()
    cu = torch.tensor([0, 2, 9]) if kwargs.get("cu") else None
    options = {"output_final_state": True, "activation": "silu", "cu_seqlens": cu}
    y, final = causal_conv1d(**leaves, backend="cuda", **options)
    assert last_decision().backend == "causal_conv1d"
    ours, state = causal_conv1d(**leaves, **options)
    assert_close("y", ours, y, 1e-6)
    assert torch.equal(final, state)
    got = torch.autograd.grad(y.square().sum() + final.sum(), list(leaves.values()))
    want = torch.autograd.grad(ours.square().sum() + state.sum(), list(leaves.values()))
    for name, a, b in zip(leaves, want, got, strict=True):
        assert_close(name, a, b, 1e-5)


@pytest.mark.usefixtures("library")
def test_calls_that_it_does_not_cover_are_ours():
    x = torch.randn(1, 6, 8)
    for weight, kwargs, why in (
        (torch.randn(8, 5), {}, "2 to 4 taps"),
        (torch.randn(8, 4), {"cu_seqlens": torch.tensor([0, 6]), "initial_state": torch.randn(1, 8, 4)}, "packed"),
    ):
        y = causal_conv1d(x, weight, backend="cuda", **kwargs)[0]
        assert why in repr(last_decision())
        assert torch.equal(y, causal_conv1d(x, weight, **kwargs)[0])
    causal_conv1d(x[..., :6], torch.randn(6, 4), backend="cuda")
    assert "multiples of 8" in repr(last_decision())


@pytest.mark.usefixtures("library")
def test_the_module_and_the_short_forms_ask_for_it(monkeypatch: pytest.MonkeyPatch):
    x = torch.randn(1, 6, 8)
    conv = ShortConvolution(8, 4, backend="cuda")
    assert conv.backend == "cuda"
    y = conv(x)[0]
    assert "causal_conv1d" in repr(last_decision())
    w = conv.weight.squeeze(1)
    assert torch.equal(fast_causal_conv1d_fn(x, w, activation="silu")[0], y)
    assert torch.equal(causal_conv1d_cuda(x, w, activation="silu", unknown=1)[0], y)
    monkeypatch.setenv("FLA_CAUSAL_CONV1D", "0")
    conv(x)
    assert last_decision().backend == "torch"


def test_context_parallel_names_say_that_they_are_not_there():
    from fla.modules.causal_conv1d.cp import causal_conv1d_cp
    from fla.modules.token_shift_cp import token_shift_cp

    x = torch.zeros(1, 4, 8)
    for call in (lambda c: causal_conv1d_cp(x, torch.zeros(8, 4), cp_context=c), lambda c: token_shift_cp(x, c)):
        with pytest.raises(ValueError, match="cp_context"):
            call(None)
        with pytest.raises(NotImplementedError, match="context parallelism"):
            call(object())
