# SPDX-License-Identifier: MIT
"""The elementwise, rotary and token shift kernels in the Triton interpreter against PyTorch in float64."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))

from kernel_cases import assert_kernels_match

from fla.backends import use_backend
from fla.modules import activations as A
from fla.modules.rotary import RotaryEmbedding, rotary_embedding, rotary_embedding_fwdbwd, rotary_pair
from fla.modules.token_shift import token_shift

ONE = (A.sigmoid, A.logsigmoid, A.swish, A.elu_p1, A.sqrelu, A.fast_gelu_impl)
TWO = (A.swiglu, A.sigmoidglu, A.powglu)
LINEAR = (A.swiglu_linear, A.sigmoidglu_linear, A.powglu_linear)


@pytest.fixture(autouse=True)
def _seed():
    if torch.cuda.is_available():
        pytest.skip("a GPU checks the compiled kernels, in tests/gpu")
    torch.manual_seed(0)


@pytest.mark.parametrize("fn", ONE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("shape", [(3, 7, 64), (5, 33), (1,), (2, 0, 8)])
def test_activations(fn, shape: tuple[int, ...]):
    assert_kernels_match(fn, {"x": 3 * torch.randn(shape)})


@pytest.mark.parametrize("fn", ONE, ids=lambda f: f.__name__)
def test_activations_at_extreme_values(fn):
    x = torch.tensor([-200.0, -100.0, -87.5, -50.0, -1e-30, 0.0, 1e-40, 1e-10, 50.0, 100.0, 200.0])
    with use_backend("triton"):
        torch.testing.assert_close(fn(x), fn.op.fn(x.double()).float(), rtol=1e-5, atol=1e-37)


def test_a_power_gate_has_finite_gradients_near_zero():
    x = torch.tensor([-3.0, 0.0, 1e-40, 1e-30, 1e-5, 50.0], requires_grad=True)
    with use_backend("triton"):
        A.powglu(x, torch.ones(6), 30.0).sum().backward()
    assert x.grad.isfinite().all()


def test_temperature():
    assert_kernels_match(A.logsigmoid, {"x": torch.randn(4, 9)}, temperature=16)


def test_a_gate_of_16_bits_comes_out_in_32():
    x = torch.randn(4, 32).half().requires_grad_()
    for backend in ("triton", "torch"):
        with use_backend(backend):
            y = A.logsigmoid(x, 16.0, torch.float32)
        assert y.dtype == torch.float32
        torch.testing.assert_close(y, torch.nn.functional.logsigmoid(x.float()) / 16)
        (dx,) = torch.autograd.grad(y, x, torch.full_like(y, 1e3))
        torch.testing.assert_close(dx, (62.5 * torch.sigmoid(-x.float())).half())


@pytest.mark.parametrize("fn", TWO, ids=lambda f: f.__name__)
@pytest.mark.parametrize("shape", [(3, 7, 64), (5, 33), (0, 4)])
def test_gated_activations(fn, shape: tuple[int, ...]):
    assert_kernels_match(fn, {"x": 2 * torch.randn(shape), "y": torch.randn(shape)})


@pytest.mark.parametrize("fn", LINEAR, ids=lambda f: f.__name__)
@pytest.mark.parametrize("bias", [True, False])
def test_gated_activations_before_a_linear_layer(fn, bias: bool):
    tensors = {"x": torch.randn(2, 3, 16), "y": torch.randn(2, 3, 16), "weight": torch.randn(5, 16)}
    if bias:
        assert_kernels_match(fn, {**tensors, "bias": torch.randn(5)})
    else:
        assert_kernels_match(fn, tensors, bias=None)


@pytest.mark.parametrize("D", [96, 34])
def test_halves_of_a_projection_are_read_in_place(D: int):
    def halves(p: Tensor) -> Tensor:
        return A.swiglu(*p.chunk(2, -1))

    assert_kernels_match(halves, {"p": torch.randn(4, 6, D)})
    assert_kernels_match(lambda p: halves(p)[..., ::2], {"p": torch.randn(4, 6, D)})


def tables(n: int, R: int, **kw) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    angle = 6 * torch.rand(n, R)
    cos, sin = angle.cos(), angle.sin()
    return {"cos": cos, "sin": sin}, {"cos": cos.double(), "sin": sin.double()}


@pytest.mark.parametrize(("H", "D", "R"), [(1, 8, 4), (3, 10, 3), (40, 8, 2), (2, 128, 64)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", [0, 5, [-3, 4]])
def test_rotary(H: int, D: int, R: int, interleaved: bool, offsets: int | list[int]):
    t, exact = tables(20, R)
    kw = {"interleaved": interleaved, "seqlen_offsets": offsets if isinstance(offsets, int) else torch.tensor(offsets)}
    assert_kernels_match(rotary_embedding, {"x": torch.randn(2, 9, H, D)}, exact=exact, **t, **kw)
    assert_kernels_match(
        rotary_embedding_fwdbwd, {"x": torch.randn(2, 9, H, D)}, exact=exact, conjugate=True, **t, **kw
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("offsets", [0, [0, 9, -1, 4, -2]])
def test_packed_rotary_starts_again_at_every_sequence(dtype: torch.dtype, offsets: int | list[int]):
    t, exact = tables(30, 4)
    kw = {"seqlen_offsets": offsets if isinstance(offsets, int) else torch.tensor(offsets, dtype=dtype)}
    cu = torch.tensor([0, 3, 3, 4, 15, 20], dtype=dtype)
    assert_kernels_match(rotary_embedding, {"x": torch.randn(1, 20, 2, 8)}, exact=exact, cu_seqlens=cu, **t, **kw)


def test_rotary_in_place_and_of_a_slice():
    t, exact = tables(20, 4)
    offsets = torch.tensor([-3, 2])
    in_place = lambda x, **kw: rotary_embedding(x * 1.0, inplace=True, **kw)
    assert_kernels_match(in_place, {"x": torch.randn(2, 9, 2, 10)}, exact=exact, seqlen_offsets=offsets, **t)
    part = lambda x, **kw: rotary_embedding(x[:, :, 2:4], **kw)
    assert_kernels_match(part, {"x": torch.randn(2, 9, 6, 8)}, exact=exact, **t)
    x = torch.randn(2, 9, 2, 8)
    with use_backend("triton"):
        want = rotary_embedding(x, **t)
        assert rotary_embedding(x, inplace=True, **t) is x
    assert torch.equal(x, want)


@pytest.mark.parametrize(("H", "HK"), [(4, 4), (4, 1), (1, 6), (40, 3)])
@pytest.mark.parametrize("scale_base", [None, 16.0])
def test_queries_and_keys_at_once(H: int, HK: int, scale_base: float | None):
    rotary = RotaryEmbedding(8, scale_base=scale_base)
    tensors = {"q": torch.randn(2, 5, H, 10), "k": torch.randn(2, 5, HK, 10)}
    rotary(**tensors)
    t = {"cos": rotary._cos_cached, "sin": rotary._sin_cached, "cos_k": rotary._cos_k_cached}
    t["sin_k"] = rotary._sin_k_cached
    exact = {n: x.double() for n, x in t.items()}
    assert_kernels_match(rotary_pair, tensors, exact=exact, **t)
    assert_kernels_match(
        lambda **kw: rotary_pair(**kw)[0],
        {"q": tensors["q"]},
        exact={**exact, "k": tensors["k"].double()},
        k=tensors["k"],
        **t,
    )
    assert_kernels_match(
        lambda **kw: rotary_pair(**kw)[1],
        {"k": tensors["k"]},
        exact={**exact, "q": tensors["q"].double()},
        q=tensors["q"],
        **t,
    )
    with use_backend("triton"):
        q, k = rotary(**tensors)
    torch.testing.assert_close((q, k), rotary(**tensors))


def test_padding_is_zero_whatever_it_holds_and_a_missing_table_row_shows():
    t, _ = tables(9, 4)
    x = torch.randn(2, 9, 2, 8)
    x[0, :2] = float("nan")
    with use_backend("triton"):
        y = rotary_embedding(x, **t, seqlen_offsets=torch.tensor([-2, 1]))
    assert torch.equal(y[0, :2], torch.zeros(2, 2, 8))
    assert y[0].isfinite().all()
    assert y[1, :8].isfinite().all()
    assert y[1, 8].isnan().all()


@pytest.mark.parametrize("D", [8, 33])
@pytest.mark.parametrize(("B", "T"), [(2, 1), (3, 9)])
def test_token_shift(D: int, B: int, T: int):
    assert_kernels_match(token_shift, {"x": torch.randn(B, T, D)})
    assert_kernels_match(token_shift, {"x": torch.randn(B, T, D), "cache": torch.randn(B, D)}, output_cache=True)


def test_packed_token_shift_passes_the_cache_of_empty_sequences_on():
    cu = torch.tensor([0, 0, 3, 3, 4, 15, 20, 20])
    tensors = {"x": torch.randn(1, 20, 8), "cache": torch.randn(7, 8)}
    assert_kernels_match(token_shift, tensors, cu_seqlens=cu, output_cache=True)
    assert_kernels_match(token_shift, {"x": tensors["x"]}, cu_seqlens=cu, output_cache=True)
    assert_kernels_match(token_shift, {"x": torch.randn(2, 0, 8), "cache": torch.randn(2, 8)}, output_cache=True)
