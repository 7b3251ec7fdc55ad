# SPDX-License-Identifier: MIT
"""The short convolution: formula, states, packed sequences, decoding, bad input."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fla.modules import ShortConvolution
from fla.modules.causal_conv1d import causal_conv1d, causal_conv1d_update, causal_conv1d_update_states
from fla.utils import assert_close


def token_loop(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, silu: bool) -> tuple[Tensor, Tensor]:
    """One sequence ``[T, D]`` and its state ``[D, W]``, one token at a time."""
    out = []
    for row in x:
        state = torch.cat([state[:, 1:], row[:, None]], 1)
        p = (state * weight).sum(1) + (0 if bias is None else bias)
        out.append(F.silu(p) if silu else p)
    return torch.stack(out) if out else x, state


def inputs(B: int, T: int, D: int, W: int, N: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    torch.manual_seed(0)
    made = {
        "x": torch.randn(B, T, D, dtype=dtype),
        "weight": torch.randn(D, W, dtype=dtype),
        "bias": torch.randn(D, dtype=dtype),
        "residual": torch.randn(B, T, D, dtype=dtype),
        "initial_state": torch.randn(N, D, W, dtype=dtype),
    }
    return {name: tensor.requires_grad_() for name, tensor in made.items()}


# T below, at and above W; W = 1 has no history at all; the lengths include empty sequences at both ends.
@pytest.mark.parametrize(("T", "W"), [(1, 4), (3, 4), (9, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("cu", [None, "packed"])
def test_output_state_and_gradients_match_the_token_loop(T: int, W: int, activation: str | None, cu: str | None):
    if cu is None:
        B, bounds, offsets = 2, [(0, 0, T), (1, 0, T)], None
    else:
        offsets = torch.tensor([0, 0, 1, T, T])
        B, bounds = 1, [(0, int(a), int(b)) for a, b in itertools.pairwise(offsets)]
    a = inputs(B, T, 5, W, len(bounds))
    b = {name: t.detach().clone().requires_grad_() for name, t in a.items()}
    y, final = causal_conv1d(**a, output_final_state=True, activation=activation, cu_seqlens=offsets)
    rows, states = [], []
    for n, (row, start, end) in enumerate(bounds):
        o, s = token_loop(b["x"][row, start:end], b["weight"], b["bias"], b["initial_state"][n], activation == "silu")
        rows.append(o)
        states.append(s)
    ref = torch.cat(rows).view_as(b["x"]) + b["residual"]
    ref_final = torch.stack(states)
    assert_close("y", ref, y, 1e-10)
    assert_close("final", ref_final, final, 1e-10)
    torch.manual_seed(1)
    dy, ds = torch.randn_like(ref), torch.randn_like(ref_final)
    ((y * dy).sum() + (final * ds).sum()).backward()
    ((ref * dy).sum() + (ref_final * ds).sum()).backward()
    for name in a:
        assert_close(name, b[name].grad, a[name].grad, 1e-10)


def test_no_state_is_a_state_of_zeros():
    a = inputs(2, 7, 4, 4, 2)
    y = causal_conv1d(a["x"], a["weight"])[0]
    assert torch.equal(y, causal_conv1d(a["x"], a["weight"], initial_state=torch.zeros(2, 4, 4).double())[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_inputs_are_rounded_once(dtype: torch.dtype):
    a = {name: t.detach().to(dtype) for name, t in inputs(2, 33, 8, 4, 2).items()}
    y, final = causal_conv1d(**a, activation="swish", output_final_state=True)
    ref = causal_conv1d(**{n: t.double() for n, t in a.items()}, activation="swish")[0]
    assert y.dtype == final.dtype == dtype
    assert_close("y", ref, y.double(), 3e-3)


def test_float32_weights_on_bfloat16_inputs_give_bfloat16():
    y = causal_conv1d(torch.randn(1, 5, 4).bfloat16(), torch.randn(4, 3))[0]
    assert y.dtype == torch.bfloat16


def test_strided_and_expanded_tensors_are_read_as_they_are():
    torch.manual_seed(0)
    qkv = torch.randn(2, 9, 18)
    w = torch.randn(6, 4)
    part = qkv[..., 6:12].detach().requires_grad_()
    y = causal_conv1d(part, w)[0]
    assert torch.equal(y, causal_conv1d(part.contiguous(), w)[0])
    y.backward(torch.ones(()).expand_as(y))
    assert part.grad is not None
    assert part.grad.isfinite().all()


def test_trailing_axes_hold_the_channels():
    x, w = torch.randn(2, 5, 3, 4), torch.randn(12, 4)
    y = causal_conv1d(x, w)[0]
    assert torch.equal(y, causal_conv1d(x.flatten(2), w)[0].view_as(x))


def test_no_tokens():
    state = torch.randn(2, 4, 3)
    y, final = causal_conv1d(torch.randn(2, 0, 4), torch.randn(4, 3), initial_state=state, output_final_state=True)
    assert y.shape == (2, 0, 4)
    assert torch.equal(final, state)


def test_edited_offsets_are_read_again():
    x, w = torch.randn(1, 6, 4), torch.randn(4, 3)
    cu = torch.tensor([0, 2, 6])
    causal_conv1d(x, w, cu_seqlens=cu)
    cu[1] = 4
    expected = torch.cat([causal_conv1d(x[:, :4], w)[0], causal_conv1d(x[:, 4:], w)[0]], 1)
    assert_close("y", expected, causal_conv1d(x, w, cu_seqlens=cu)[0], 1e-6)


def test_update_states_keeps_the_last_inputs():
    x = torch.randn(1, 5, 2)
    s = causal_conv1d_update_states(x, 3, cu_seqlens=torch.tensor([0, 1, 5]))
    assert torch.equal(s[0], F.pad(x[0, :1].T, (2, 0)))
    assert torch.equal(s[1], x[0, 2:].T)


@pytest.mark.parametrize("shape", [(3, 8), (3, 1, 8), (1, 3, 8)])
def test_one_step_updates_the_cache_in_place(shape: tuple[int, ...]):
    conv = ShortConvolution(8, 4, bias=True)
    past, new = torch.randn(3, 6, 8), torch.randn(3, 1, 8)
    with torch.no_grad():
        full = conv(torch.cat([past, new], 1))[0][:, -1]
        _, cache = conv(past, output_final_state=True)
        y, same = causal_conv1d_update(
            new.view(shape), cache, weight=conv.weight[:, 0], bias=conv.bias, activation="silu"
        )
    assert same is cache
    assert torch.equal(cache[..., -1], new[:, 0])
    assert_close("y", full, y.view(3, 8), 1e-6)


def test_a_weight_may_have_the_shape_that_conv1d_has():
    torch.manual_seed(0)
    x, dy = torch.randn(2, 2, 9, 6)
    w = torch.randn(6, 1, 4, requires_grad=True)
    flat = w.detach().squeeze(1).requires_grad_()
    y, state = causal_conv1d(x, w, activation="silu", output_final_state=True)
    z, same = causal_conv1d(x, flat, activation="silu", output_final_state=True)
    assert torch.equal(y, z)
    assert torch.equal(state, same)
    (dw,), (dflat,) = torch.autograd.grad(y, [w], dy), torch.autograd.grad(z, [flat], dy)
    assert torch.equal(dw, dflat[:, None])
    one, _ = causal_conv1d_update(x[:, 0], state.clone(), weight=w.detach(), activation="silu")
    other, _ = causal_conv1d_update(x[:, 0], state.clone(), weight=flat.detach(), activation="silu")
    assert torch.equal(one, other)


# E05: one token for each sequence and fewer tokens than taps, with and without autograd.
@pytest.mark.parametrize("shape", [(3, 1, 8), (1, 3, 8)])
@pytest.mark.parametrize("grad", [True, False])
def test_inputs_shorter_than_the_kernel(shape: tuple[int, ...], grad: bool):
    conv = ShortConvolution(8, 4)
    x = torch.randn(shape)
    with torch.set_grad_enabled(grad):
        y, state = conv(x, output_final_state=True)
    padded = F.pad(x, (0, 0, 3, 0)).transpose(1, 2)
    assert_close("y", F.silu(F.conv1d(padded, conv.weight, groups=8)).transpose(1, 2), y, 1e-5)
    assert torch.equal(state, F.pad(x.transpose(1, 2), (4, 0))[..., -4:])


def test_decoding_matches_prefill_for_batches_and_packed_rows():
    conv = ShortConvolution(6, 4)
    x = torch.randn(3, 7, 6)
    with torch.no_grad():
        full = conv(x)[0]
        _, cache = conv(x[:, :4], output_final_state=True)
        packed = cache.clone()
        for t in range(4, 7):
            y, cache = conv(x[:, t : t + 1], cache=cache, output_final_state=True)
            z, packed = conv(
                x[None, :, t], cache=packed, output_final_state=True, cu_seqlens=torch.arange(4, dtype=torch.int32)
            )
            assert_close("y", full[:, t : t + 1], y, 1e-5)
            assert_close("z", full[:, t], z[0], 1e-5)


def test_prefill_does_not_change_the_cache_it_continues():
    conv = ShortConvolution(6, 4)
    x = torch.randn(2, 9, 6)
    full = conv(x)[0]
    cache = conv(x[:, :4], output_final_state=True)[1].detach()
    before = cache.clone()
    assert_close("y", full[:, 4:], conv(x[:, 4:], cache=cache)[0], 1e-5)
    assert torch.equal(cache, before)


def test_an_empty_sequence_beside_others_is_no_decoding_step():
    conv = ShortConvolution(4, 3)
    x, cu = torch.randn(1, 2, 4), torch.tensor([0, 0, 2])
    with torch.no_grad():
        y = conv(x, cu_seqlens=cu, output_final_state=True)[0]
    assert_close("y", conv(x)[0], y, 1e-6)


def test_mask_zeroes_inputs_and_leaves_the_callers_tensor_alone():
    conv = ShortConvolution(4, 3)
    x = torch.randn(2, 5, 4, requires_grad=True)
    before, mask = x.detach().clone(), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    y = conv(x, mask=mask)[0]
    y.sum().backward()
    assert torch.equal(x, before)
    assert_close("y", conv(x[:1, 2:])[0], y[:1, 2:], 1e-6)


def test_state_dict_and_attributes():
    conv = ShortConvolution(8, 4, bias=True)
    assert {k: tuple(v.shape) for k, v in conv.state_dict().items()} == {"weight": (8, 1, 4), "bias": (8,)}
    assert conv.state_size == 32
    assert conv.kernel_size == (4,)


def test_unknown_keywords_of_forward_are_ignored():
    conv, x = ShortConvolution(4, 3), torch.randn(1, 5, 4)
    assert torch.equal(conv(x, use_precomputed=False)[0], conv(x)[0])


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"weight": None}, "weight"),
        ({"weight": torch.zeros(5, 3)}, "weight"),
        ({"bias": torch.zeros(3)}, "bias"),
        ({"residual": torch.zeros(1, 6, 3)}, "residual"),
        ({"activation": "relu"}, "activation"),
        ({"backend": "numpy"}, "backend"),
        ({"initial_state": torch.zeros(1, 4, 2)}, "initial_state"),
        ({"initial_state": torch.zeros(2, 4, 3)}, "initial states"),
        ({"cu_seqlens": torch.tensor([0, 3, 5])}, "cu_seqlens"),
        ({"cu_seqlens": torch.tensor([0, 4, 3, 6])}, "cu_seqlens"),
        ({"cu_seqlens": torch.tensor([0.0, 6.0])}, "cu_seqlens"),
    ],
)
def test_wrong_arguments_are_named(kwargs: dict, match: str):
    with pytest.raises(ValueError, match=match):
        causal_conv1d(**{"x": torch.zeros(1, 6, 4), "weight": torch.zeros(4, 3), **kwargs})


def test_offsets_with_a_batch_are_refused():
    with pytest.raises(ValueError, match="batch size is expected to be 1"):
        causal_conv1d(torch.zeros(2, 3, 4), torch.zeros(4, 3), cu_seqlens=torch.tensor([0, 3]))


def test_unknown_keyword_of_the_function_is_a_type_error():
    with pytest.raises(TypeError):
        causal_conv1d(torch.zeros(1, 6, 4), torch.zeros(4, 3), activatoin="silu")


def test_the_library_has_to_be_installed_to_be_asked_for():
    with pytest.raises(ValueError, match="causal-conv1d, which is not installed"):
        causal_conv1d(torch.zeros(1, 6, 4), torch.zeros(4, 3), backend="cuda")
    y = causal_conv1d(torch.ones(1, 6, 4), torch.ones(4, 3), backend="mix")[0]
    assert y[0, :, 0].tolist() == [1, 2, 3, 3, 3, 3]


@pytest.mark.parametrize("kwargs", [{"cp_context": object()}, {"seq_idx": torch.zeros(1, 6)}])
def test_what_is_not_there_yet_says_so(kwargs: dict):
    with pytest.raises(NotImplementedError, match=next(iter(kwargs))):
        causal_conv1d(torch.zeros(1, 6, 4), torch.zeros(4, 3), **kwargs)


def test_a_failed_update_writes_nothing():
    cache = torch.randn(2, 4, 3)
    before = cache.clone()
    with pytest.raises(ValueError, match="residual"):
        causal_conv1d_update(torch.zeros(2, 4), cache, residual=torch.zeros(2, 3), weight=torch.zeros(4, 3))
    with pytest.raises(ValueError, match="cache"):
        causal_conv1d_update(torch.zeros(2, 4), None, weight=torch.zeros(4, 3))
    assert torch.equal(cache, before)


def test_backend_of_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLA_CONV_BACKEND", "cuda")
    with pytest.warns(UserWarning, match="causal-conv1d"):
        conv = ShortConvolution(4, 3)
    assert conv.backend == "triton"
    with pytest.raises(ValueError, match="activation"):
        ShortConvolution(4, 3, activation="gelu")
