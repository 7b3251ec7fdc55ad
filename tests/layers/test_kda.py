# SPDX-License-Identifier: MIT
"""KimiDeltaAttention against its formula, token by token, and the contract of every recurrent layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fla.layers import KimiDeltaAttention
from fla.models.utils import Cache
from fla.utils import assert_close


def make(**kwargs: Any) -> KimiDeltaAttention:
    torch.manual_seed(0)
    return KimiDeltaAttention(**{"hidden_size": 24, "head_dim": 8, "num_heads": 2, "layer_idx": 0, **kwargs})


def formula(layer: KimiDeltaAttention, x: Tensor) -> Tensor:
    """One sequence ``[T, D]`` in float64, a token at a time."""
    layer = layer.double()
    H, HV, K, V = layer.num_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim

    def branch(name: str) -> Tensor:
        p = getattr(layer, f"{name}_proj")(x)
        if layer.use_short_conv:
            conv = getattr(layer, f"{name}_conv1d")
            p = F.conv1d(p.T[None], conv.weight, conv.bias, padding=3, groups=p.shape[1])[0, :, : len(x)].T
        return F.silu(p)

    q, k = (branch(n).unflatten(-1, (H, K)) for n in "qk")
    q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    q, k = (t.repeat_interleave(HV // H, 1) for t in (q, k))
    v = branch("v").unflatten(-1, (HV, V))
    f = layer.f_proj(x).unflatten(-1, (HV, K)) + layer.dt_bias.view(HV, K)
    A = layer.A_log.exp()[:, None]
    g = -A * F.softplus(f) if layer.lower_bound is None else layer.lower_bound * torch.sigmoid(A * f)
    beta = torch.sigmoid(layer.b_proj(x)) * (2 if layer.allow_neg_eigval else 1)
    S = x.new_zeros(HV, K, V)
    out = []
    for t in range(len(x)):
        S = S * g[t].exp()[..., None]
        u = v[t] - torch.einsum("hkv,hk->hv", S, k[t])
        S = S + torch.einsum("hk,hv->hkv", k[t] * beta[t][:, None], u)
        out.append(torch.einsum("hkv,hk->hv", S, q[t]) * K**-0.5)
    o = torch.stack(out)
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-5) * layer.o_norm.weight
    o = o * torch.sigmoid(layer.g_proj(x).view_as(o))
    return layer.o_proj(o.flatten(-2))


# Q01: twice as many value heads as query heads.
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"num_v_heads": 4, "expand_v": 2},
        {"allow_neg_eigval": True, "use_short_conv": False},
        {"safe_gate": True, "lower_bound": -5.0},
        {"lower_bound": -3.0, "conv_bias": True},
    ],
)
@pytest.mark.filterwarnings("ignore:.*without short")
@pytest.mark.parametrize("grad", [True, False])
def test_layer_matches_its_formula(kwargs: dict, grad: bool):
    layer = make(**kwargs).eval()
    x = torch.randn(2, 21, 24)
    with torch.set_grad_enabled(grad):
        y = layer(x)[0]
    with torch.no_grad():
        ref = torch.stack([formula(layer, row) for row in x.double()])
    assert_close("y", ref, y.double(), 2e-5)


def test_gradients_match_the_formula():
    layer, x = make(num_v_heads=4).double(), torch.randn(1, 13, 24, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(1, 13, 24, dtype=torch.float64)
    wanted = [x, *layer.parameters()]
    got = torch.autograd.grad((layer(x)[0] * dy).sum(), wanted)
    ref = torch.autograd.grad((formula(layer, x[0])[None] * dy).sum(), wanted)
    for name, e, g in zip(["x", *(n for n, _ in layer.named_parameters())], ref, got, strict=True):
        assert_close(name, e, g, 1e-5)


@pytest.mark.parametrize("mode", ["chunk", "fused_recurrent"])
@pytest.mark.parametrize("length", [9, 70])
def test_prefill_and_decoding_give_what_one_pass_gives(mode: str, length: int):
    layer = make(mode=mode).eval()
    x = torch.randn(2, length + 3, 24)
    cache = Cache()
    with torch.no_grad():
        full = layer(x)[0]
        parts = [layer(x[:, :length], past_key_values=cache, use_cache=True)[0]]
        parts += [layer(x[:, t : t + 1], past_key_values=cache, use_cache=True)[0] for t in range(length, length + 3)]
    assert_close("y", full, torch.cat(parts, 1), 1e-5)
    assert cache.get_seq_length() == length + 3
    entry = cache[0]
    assert entry is not None
    assert entry["recurrent_state"].shape == (2, 2, 8, 8)
    assert entry["recurrent_state"].dtype == torch.float32
    assert [s.shape for s in entry["conv_state"]] == [(2, 16, 4)] * 3


def test_a_cache_that_is_only_read_stays_as_it_is():
    layer, x, cache = make().eval(), torch.randn(1, 6, 24), Cache()
    layer(x, past_key_values=cache, use_cache=True)
    before = cache[0]["recurrent_state"].clone(), cache[0]["conv_state"][0].clone()
    layer(x, past_key_values=cache)
    assert cache.get_seq_length() == 6
    assert torch.equal(cache[0]["recurrent_state"], before[0])
    assert torch.equal(cache[0]["conv_state"][0], before[1])


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_padding_changes_nothing(side: str):
    layer, x = make(), torch.randn(2, 8, 24)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, {"left": slice(0, 3), "right": slice(6, 8), "middle": slice(2, 5)}[side]] = 0
    y = layer(x, attention_mask=mask)[0]
    assert_close("y", layer(x[:1, mask[0] == 1])[0], y[:1, mask[0] == 1], 1e-5)
    assert_close("y", layer(x[1:])[0], y[1:], 1e-5)
    assert (y[0, mask[0] == 0] == 0).all()


def test_masked_decoding_gives_what_each_row_gives_alone():
    layer, x = make().eval(), torch.randn(2, 9, 24)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    cache = Cache()
    with torch.no_grad():
        parts = [layer(x[:, :6], attention_mask=mask[:, :6], past_key_values=cache, use_cache=True)[0]]
        for t in range(6, 9):
            parts.append(
                layer(x[:, t : t + 1], attention_mask=mask[:, : t + 1], past_key_values=cache, use_cache=True)[0]
            )
        y = torch.cat(parts, 1)
        assert_close("y", layer(x[:1, 3:])[0], y[:1, 3:], 1e-5)
        assert_close("y", layer(x[1:])[0], y[1:], 1e-5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_sequences_give_what_each_gives_alone(dtype: torch.dtype):
    layer = make()
    x = torch.randn(1, 12, 24, requires_grad=True)
    cu = torch.tensor([0, 5, 5, 12], dtype=dtype)
    y = layer(x, cu_seqlens=cu, attention_mask=torch.ones(1, 12))[0]
    ref = torch.cat([layer(x[:, :5])[0], layer(x[:, 5:])[0]], 1)
    assert_close("y", ref, y, 1e-5)
    dy = torch.randn_like(y)
    wanted = [x, *layer.parameters()]
    for e, g in zip(
        torch.autograd.grad((ref * dy).sum(), wanted), torch.autograd.grad((y * dy).sum(), wanted), strict=True
    ):
        assert_close("grad", e, g, 1e-4)


# N23: what is in the batch beside a sequence does not matter.
def test_a_row_is_the_same_alone_and_in_a_batch():
    layer, x = make().eval(), torch.randn(1, 30, 24)
    with torch.no_grad():
        assert_close("y", layer(x)[0].expand(8, -1, -1), layer(x.expand(8, -1, -1))[0], 1e-6)


def test_fresh_layers_are_initialised():
    layer = make(num_heads=4, head_dim=16)
    A, dt = layer.A_log.exp(), F.softplus(layer.dt_bias)
    assert ((A >= 1 - 1e-5) & (A <= 16)).all()
    assert ((dt >= 0.99e-3) & (dt <= 0.101)).all()
    assert (make(safe_gate=True, lower_bound=-5).A_log == 0).all()
    assert layer.A_log._no_weight_decay
    assert layer.dt_bias._no_weight_decay
    with torch.device("meta"):
        assert make().A_log.is_meta


def test_decay_parameters_are_float32_whatever_the_default():
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = make()
        y = layer(torch.randn(1, 5, 24))[0]
    finally:
        torch.set_default_dtype(torch.float32)
    assert layer.A_log.dtype == layer.dt_bias.dtype == layer.o_norm.weight.dtype == torch.float32
    assert y.dtype == layer.q_proj.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype):
    layer, x = make(), torch.randn(2, 20, 24)
    with torch.autocast("cpu", dtype=dtype):
        y = layer(x)[0]
    assert y.dtype == dtype
    y.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    assert_close("y", layer(x)[0], y.float(), 3e-2)


def test_state_dict():
    shapes = {name: list(p.shape) for name, p in make(num_v_heads=4, expand_v=2).state_dict().items()}
    assert shapes == {
        "A_log": [4],
        "dt_bias": [32],
        "q_proj.weight": [16, 24],
        "k_proj.weight": [16, 24],
        "v_proj.weight": [64, 24],
        "q_conv1d.weight": [16, 1, 4],
        "k_conv1d.weight": [16, 1, 4],
        "v_conv1d.weight": [64, 1, 4],
        "f_proj.0.weight": [16, 24],
        "f_proj.1.weight": [32, 16],
        "b_proj.weight": [4, 24],
        "g_proj.0.weight": [16, 24],
        "g_proj.1.weight": [64, 16],
        "g_proj.1.bias": [64],
        "o_norm.weight": [16],
        "o_proj.weight": [24, 64],
    }


def test_both_names_of_the_cache_work_and_unknown_keywords_are_ignored():
    layer, x, cache = make().eval(), torch.randn(1, 4, 24), Cache()
    out = layer(x, cache=cache, use_cache=True, position_ids=None, anything=1)
    assert out[1] is None
    assert out[2] is cache
    assert cache.get_seq_length() == 4


def test_no_tokens():
    assert make()(torch.randn(2, 0, 24))[0].shape == (2, 0, 24)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"num_v_heads": 3}, "num_v_heads"),
        ({"mode": "parallel"}, "mode"),
        ({"expand_v": 0.3}, "expand_v"),
        ({"safe_gate": True}, "lower_bound"),
    ],
)
def test_wrong_constructor_arguments_are_named(kwargs: dict, match: str):
    with pytest.raises(ValueError, match=match):
        make(**kwargs)


def test_wrong_calls_are_named_and_leave_the_cache_alone():
    layer, x, cache = make(), torch.randn(2, 4, 24), Cache()
    with pytest.raises(ValueError, match="requires `layer_idx`"):
        make(layer_idx=None)(x, past_key_values=cache, use_cache=True)
    with pytest.raises(AssertionError, match="attention_mask"):
        layer(x, attention_mask=torch.ones(2, 1, 4, 4), past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match="batch size is expected to be 1"):
        layer(x, cu_seqlens=torch.tensor([0, 4]), past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match="cu_seqlens"):
        layer(x[:1], cu_seqlens=torch.tensor([0, 3]), past_key_values=cache, use_cache=True)
    with pytest.raises(AssertionError, match="training mode"), torch.no_grad():
        make(mode="fused_recurrent")(x)
    assert len(cache) == 0


def test_no_short_convolution_warns():
    with pytest.warns(UserWarning, match="short convolutions"):
        make(use_short_conv=False)
