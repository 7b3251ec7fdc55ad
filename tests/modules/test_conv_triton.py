# SPDX-License-Identifier: MIT
"""The convolution's kernels in the Triton interpreter, against the PyTorch path in float64 (tested on its own)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fla.backends import last_decision, use_backend
from fla.modules.causal_conv1d import (
    CausalConv1dFunction,
    causal_conv1d,
    causal_conv1d_bwd,
    causal_conv1d_fwd,
    causal_conv1d_update,
)
from fla.modules.causal_conv1d.launch import Call, conv_plan, rows_of
from fla.ops._common.policy import CHIPS
from fla.utils import assert_close

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels have their own lane")


def inputs(B: int, T: int, D: int, W: int, N: int, names: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    made = {
        "x": torch.randn(B, T, D),
        "weight": torch.randn(D, W),
        "bias": torch.randn(D),
        "residual": torch.randn(B, T, D),
        "initial_state": torch.randn(N, D, W),
    }
    return {name: tensor for name, tensor in made.items() if name in ("x", "weight") or name[0] in names}


def results(a: dict[str, Tensor], dy: Tensor, ds: Tensor | None, **kwargs: Any) -> dict[str, Tensor]:
    leaves = {n: t.detach().clone().requires_grad_() for n, t in a.items()}
    y, final = causal_conv1d(**leaves, output_final_state=ds is not None, **kwargs)
    flows = [(y, dy)] if ds is None else [(y, dy), (final, ds)]
    grads = torch.autograd.grad([o for o, _ in flows], list(leaves.values()), [g.to(o.dtype) for o, g in flows])
    return {"y": y, **({} if ds is None else {"final": final}), **dict(zip(leaves, grads, strict=True))}


# T below, at and above W, over chunk borders; packed rows with empty, short and full sequences.
CASES = [
    (2, 9, 5, 4, None, "bri", True, "silu"),
    (2, 40, 33, 4, None, "", False, None),
    (2, 3, 8, 4, None, "bi", True, "silu"),
    (3, 1, 8, 3, None, "i", True, "silu"),
    (1, 21, 8, 2, None, "bri", False, "swish"),
    (2, 5, 8, 1, None, "bi", True, "silu"),
    (1, 40, 8, 4, [0, 0, 1, 3, 24, 40, 40], "bri", True, "silu"),
    (1, 40, 8, 3, [0, 0, 1, 17, 40], "", True, None),
    (2, 0, 8, 4, None, "bi", True, "silu"),
]


@pytest.mark.parametrize(("B", "T", "D", "W", "cu", "names", "final", "activation"), CASES)
def test_outputs_states_and_gradients(
    B: int, T: int, D: int, W: int, cu: list[int] | None, names: str, final: bool, activation: str | None
):
    N = B if cu is None else len(cu) - 1
    a = inputs(B, T, D, W, N, names)
    kwargs = {"activation": activation, "cu_seqlens": None if cu is None else torch.tensor(cu)}
    dy, ds = torch.randn(B, T, D), torch.randn(N, D, W) if final else None
    with use_backend("triton", strict=True):
        got = results(a, dy, ds, **kwargs)
    ref = results({n: t.double() for n, t in a.items()}, dy, ds, **kwargs)
    for name, value in ref.items():
        assert_close(name, value, got[name].double(), 1e-5)


@pytest.mark.parametrize(
    ("wanted", "through"),
    [("x", "y"), ("weight", "y"), ("bias", "y"), ("initial_state", "y"), ("x bias", "y"), ("x", "final"),
     ("initial_state", "final"), ("x weight", "final")],
)  # fmt: skip
def test_gradients_that_alone_are_wanted(wanted: str, through: str):
    a = inputs(2, 5, 6, 4, 2, "bi")
    grad = torch.randn(2, 5, 6) if through == "y" else torch.randn(2, 6, 4)

    def grads(dtype: torch.dtype) -> list[Tensor]:
        leaves = {n: t.to(dtype).requires_grad_(n in wanted.split()) for n, t in a.items()}
        y, final = causal_conv1d(**leaves, output_final_state=True, activation="silu")
        out = y if through == "y" else final
        of = [t for t in leaves.values() if t.requires_grad]
        return list(torch.autograd.grad(out, of, grad.to(dtype), allow_unused=True, materialize_grads=True))

    with use_backend("triton", strict=True):
        got = grads(torch.float32)
    for r, g in zip(grads(torch.float64), got, strict=True):
        assert_close(wanted, r, g.double(), 1e-5)


def test_a_view_of_a_wider_tensor_is_read_as_it_lies():
    torch.manual_seed(0)
    x = torch.randn(2, 20, 24)[..., 8:16]
    assert rows_of(x).data_ptr() == x.data_ptr()
    w = torch.randn(8, 4)
    with use_backend("triton", strict=True):
        y = causal_conv1d(x, w)[0]
        expanded = causal_conv1d(torch.ones(()).expand(1, 5, 8), w)[0]
    assert_close("y", causal_conv1d(x.double(), w.double())[0], y.double(), 1e-6)
    assert_close("expanded", causal_conv1d(torch.ones(1, 5, 8), w)[0], expanded, 1e-6)


def test_an_infinite_input_reaches_its_window_only():
    x = torch.zeros(1, 20, 4)
    x[0, 5] = float("inf")
    with use_backend("triton", strict=True):
        y = causal_conv1d(x, torch.ones(4, 2))[0]
    assert y[0, :, 0].isinf().nonzero().flatten().tolist() == [5, 6]
    assert y.isfinite().sum() == y.numel() - 8


def test_a_step_of_decoding_shifts_the_cache_in_place():
    torch.manual_seed(0)
    x, cache, w, b, r = (torch.randn(s) for s in ((3, 5), (3, 5, 4), (5, 4), (5,), (3, 5)))
    ours = cache.clone()
    with use_backend("triton", strict=True):
        y, same = causal_conv1d_update(x, ours, r, w, b, "silu")
    expected, state = causal_conv1d(x[:, None], w, b, r[:, None], cache, True, "silu")
    assert same is ours
    assert torch.equal(ours, state)
    assert_close("y", expected[:, 0], y, 1e-6)
    part = torch.cat([cache, cache], 1)[:, :5]
    with use_backend("triton", strict=True):
        causal_conv1d_update(x[:, None], part, None, w)
    assert torch.equal(part, state)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_forward_and_backward_by_themselves(backend: str):
    a = inputs(2, 9, 5, 4, 2, "bri")
    dy, ds = torch.randn(2, 9, 5), torch.randn(2, 5, 4)
    ref = results(a, dy, ds, activation="silu")
    with use_backend(backend, strict=True):
        y, final = causal_conv1d_fwd(**a, output_final_state=True, activation="silu")
        assert last_decision().backend == backend
        grads = causal_conv1d_bwd(a["x"], dy, ds, *list(a.values())[1:], activation="silu")
    assert_close("y", ref["y"], y, 1e-6)
    assert_close("final", ref["final"], final, 1e-6)
    for name, grad in zip(a, grads, strict=True):
        assert_close(name, ref[name], grad, 1e-5)
    leaves = [t.clone().requires_grad_() for t in a.values()]
    y, final = CausalConv1dFunction.apply(*leaves, True, "silu", None)
    for name, grad in zip(a, torch.autograd.grad([y, final], leaves, [dy, ds]), strict=True):
        assert_close(name, ref[name], grad, 1e-5)


# G09, A02: kernels that write in place must not be run for trials, and no length may bring new trials.
def test_no_kernel_of_a_module_is_tuned_by_trial():
    import importlib

    from triton.runtime import Autotuner

    for path in ("causal_conv1d.kernels", "_norm.kernels", "_pointwise.kernels", "_loss.kernels", "rotary.kernels",
                 "_shift.kernels"):  # fmt: skip
        module = importlib.import_module(f"fla.modules.{path}")
        assert not [name for name, value in vars(module).items() if isinstance(value, Autotuner)]


def test_what_the_kernels_do_not_cover_runs_in_pytorch():
    with use_backend("triton"):
        causal_conv1d(torch.zeros(1, 6, 4), torch.zeros(4, 5))
    assert last_decision().backend == "torch"
    assert "up to 4 taps" in last_decision().rejections[-1].reason


@pytest.mark.parametrize("rows", [1, 100, 8192, 1 << 20])
@pytest.mark.parametrize("D", [1, 33, 512, 4096, 8192])
def test_plans_fill_the_chip_with_chunks_of_whole_groups_of_rows(rows: int, D: int):
    plan = conv_plan(CHIPS["sm90"], rows, D)
    assert plan.rows % 4 == 0
    assert plan.block & (plan.block - 1) == 0
    assert plan.warps in (1, 2, 4)
    call = Call.make(torch.empty(1, rows, D, device="meta"), 4, None, plan)
    assert call.strips * plan.block >= D
