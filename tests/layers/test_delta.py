# SPDX-License-Identifier: MIT
"""The layers of the delta rule against their formulas, token by token in float64. KDA has a file of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fla import layers
from fla.models.utils import Cache
from fla.utils import assert_close

D = 24
CASES: list[tuple[str, dict[str, Any]]] = [
    ("Comba", {}),
    ("Comba", {"num_v_heads": 4, "expand_v": 2, "use_output_gate": False, "conv_bias": True}),
    ("Comba", {"use_inner_decay": False, "use_short_conv": False, "correction_factor": 0.3}),
    ("Comba", {"use_output_correction": False, "use_inner_decay": False}),
    ("DeltaNet", {}),
    ("DeltaNet", {"expand_k": 0.5, "expand_v": 2, "use_gate": True, "conv_bias": True, "allow_neg_eigval": True}),
    ("DeltaNet", {"qk_activation": "elu", "qk_norm": "sum", "use_beta": False}),
    ("DeltaNet", {"qk_activation": "relu", "use_short_conv": False}),
    ("DeltaNet", {"qk_activation": "identity", "d_model": D, "hidden_size": 5}),
    ("DeltaNet", {"use_short_conv": False, "qk_norm": "sum"}),
    ("GatedDeltaNet", {}),
    ("GatedDeltaNet", {"num_v_heads": 4, "expand_v": 2, "output_gate_activation": "sigmoid"}),
    ("GatedDeltaNet", {"use_gate": False, "allow_neg_eigval": True, "conv_bias": True}),
    ("GatedDeltaNet", {"use_short_conv": False, "output_gate_activation": "silu"}),
    ("GatedDeltaNet2", {}),
    ("GatedDeltaNet2", {"num_v_heads": 4, "expand_v": 2, "allow_neg_eigval": True, "conv_bias": True}),
    ("GatedDeltaNet2", {"use_short_conv": False}),
]
LAYERS = sorted({name for name, _ in CASES})
every_layer = pytest.mark.parametrize("name", LAYERS)
pytestmark = pytest.mark.filterwarnings("ignore:.*without short convolutions")


def make(name: str, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": D, "num_heads": 2, "layer_idx": 0}
    if name != "DeltaNet":
        sizes |= {"head_dim": 8, "expand_v": 1}
    layer = getattr(layers, name)(**{**sizes, **kwargs})
    with torch.no_grad():  # parameters that start as constants take part too
        for p in layer.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return layer


def formula(layer: Any, x: Tensor) -> Tensor:
    """One sequence ``[T, D]``, a token at a time."""
    H, HV, K, V = layer.num_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    kind = type(layer).__name__

    def branch(name: str) -> Tensor:
        p = getattr(layer, f"{name}_proj")(x)
        if layer.use_short_conv:
            conv = getattr(layer, f"{name}_conv1d")
            p = F.conv1d(p.T[None], conv.weight, conv.bias, padding=3, groups=p.shape[1])[0, :, : len(x)].T
        chosen = "silu" if name == "v" else getattr(layer, "qk_activation", "silu")
        acts = {"silu": F.silu, "relu": F.relu, "elu": lambda t: F.elu(t) + 1, "identity": lambda t: t}
        return acts[chosen](p).unflatten(-1, (HV, V) if name == "v" else (H, K))

    def l2(t: Tensor) -> Tensor:
        if getattr(layer, "qk_norm", "l2") == "sum":
            return t / t.abs().sum(-1, keepdim=True)
        return t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6)

    q, k, v = (branch(n) for n in "qkv")
    p = k
    if kind == "Comba":
        if layer.use_inner_decay:
            p = k * torch.sigmoid(layer.decay)[:, None]
        if layer.use_output_correction:
            q = q - layer.D[:, None] * p
    twice = 2 if getattr(layer, "allow_neg_eigval", False) else 1
    read = write = value = torch.ones(1, 1, 1, dtype=x.dtype).expand(len(x), HV, 1)  # factors of p, k and v
    if kind == "GatedDeltaNet2":
        g = -layer.A_log.exp()[:, None] * F.softplus(layer.f_proj(x) + layer.dt_bias).unflatten(-1, (H, K))
        g = g.repeat_interleave(HV // H, 1)
        read = twice * torch.sigmoid(layer.b_proj(x)).unflatten(-1, (H, K)).repeat_interleave(HV // H, 1)
        value = torch.sigmoid(layer.w_proj(x)).unflatten(-1, (HV, V))
    else:
        if getattr(layer, "use_beta", True):
            write = twice * torch.sigmoid(layer.b_proj(x))[..., None]
        g = torch.zeros_like(write)
        if kind != "DeltaNet":
            g = -(layer.A_log.exp() * F.softplus(layer.a_proj(x) + layer.dt_bias))[..., None]
    q, k, p = (l2(t).repeat_interleave(HV // H, 1) for t in (q, k, p))
    S, out = x.new_zeros(HV, K, V), []
    for t in range(len(x)):
        decayed = S * g[t].exp()[..., None]
        u = value[t] * v[t] - torch.einsum("hkv,hk->hv", S if kind == "Comba" else decayed, read[t] * p[t])
        S = decayed + torch.einsum("hk,hv->hkv", write[t] * k[t], u)
        out.append(torch.einsum("hkv,hk->hv", S, q[t]) * K**-0.5)
    o = torch.stack(out)
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-5) * layer.o_norm.weight
    if hasattr(layer, "g_proj"):
        act = F.silu if getattr(layer.o_norm, "activation", "") in ("swish", "silu") else torch.sigmoid
        o = o * act(layer.g_proj(x)).view_as(o)
    return layer.o_proj(o.flatten(-2))


@pytest.mark.parametrize(("name", "kwargs"), CASES)
@pytest.mark.parametrize("grad", [True, False])
def test_layer_matches_its_formula(name: str, kwargs: dict, grad: bool):
    layer, x = make(name, **kwargs).eval(), torch.randn(2, 21, D)
    with torch.set_grad_enabled(grad):
        y = layer(x)[0]
    with torch.no_grad():
        layer = layer.double()
        ref = torch.stack([formula(layer, row) for row in x.double()])
    assert_close("y", ref, y.double(), 2e-5)


@pytest.mark.parametrize(("name", "kwargs"), CASES)
def test_gradients_match_the_formula(name: str, kwargs: dict):
    layer, x = make(name, **kwargs).double(), torch.randn(1, 70, D, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(1, 70, D, dtype=torch.float64)
    wanted = [x, *layer.parameters()]
    got = torch.autograd.grad((layer(x)[0] * dy).sum(), wanted)
    ref = torch.autograd.grad((formula(layer, x[0])[None] * dy).sum(), wanted)
    for label, e, g in zip(["x", *(n for n, _ in layer.named_parameters())], ref, got, strict=True):
        assert_close(label, e, g, 1e-5)


@every_layer
@pytest.mark.parametrize("mode", ["chunk", "fused_recurrent"])
def test_masked_prefill_and_decoding_give_what_each_row_gives_alone(name: str, mode: str):
    layer, x, cache = make(name, mode=mode).eval(), torch.randn(2, 73, D), Cache()
    mask = torch.ones(2, 73, dtype=torch.long)
    mask[0, :3] = 0
    with torch.no_grad():
        parts = []
        for a, b in ((0, 70), (70, 71), (71, 72), (72, 73)):
            parts.append(layer(x[:, a:b], attention_mask=mask[:, :b], past_key_values=cache, use_cache=True)[0])
        y = torch.cat(parts, 1)
        assert_close("y", layer(x[:1, 3:])[0], y[:1, 3:], 1e-5)
        assert_close("y", layer(x[1:])[0], y[1:], 1e-5)
    assert (y[0, :3] == 0).all()
    assert cache[0]["recurrent_state"].dtype == torch.float32
    assert [s.shape[-1] for s in cache[0]["conv_state"]] == [4, 4, 4]


# Value channels first where the reference's caches have them first.
@pytest.mark.parametrize("name", LAYERS)
def test_layout_of_the_state(name: str):
    layer, cache = make(name, expand_v=2).eval(), Cache()
    layer(torch.randn(3, 5, D), past_key_values=cache, use_cache=True)
    K, V = layer.head_k_dim, layer.head_v_dim
    assert cache[0]["recurrent_state"].shape == (3, 2, *((V, K) if name == "GatedDeltaNet" else (K, V)))


@every_layer
def test_packed_sequences_give_what_each_gives_alone(name: str):
    layer, x = make(name), torch.randn(1, 12, D, requires_grad=True)
    y = layer(x, cu_seqlens=torch.tensor([0, 5, 5, 12]), attention_mask=torch.ones(1, 12))[0]
    ref = torch.cat([layer(x[:, :5])[0], layer(x[:, 5:])[0]], 1)
    assert_close("y", ref, y, 1e-5)
    dy = torch.randn_like(y)
    wanted = [x, *layer.parameters()]
    grads = (torch.autograd.grad((out * dy).sum(), wanted) for out in (ref, y))
    for e, g in zip(*grads, strict=True):
        assert_close("grad", e, g, 1e-4)


@every_layer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(name: str, dtype: torch.dtype):
    layer, x = make(name), torch.randn(2, 20, D)
    with torch.autocast("cpu", dtype=dtype):
        y = layer(x)[0]
    assert y.dtype == dtype
    y.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    assert_close("y", layer(x)[0], y.float(), 3e-2)


@every_layer
def test_wrong_calls_are_named_and_leave_the_cache_alone(name: str):
    x, cache = torch.randn(2, 4, D), Cache()
    with pytest.raises(ValueError, match="requires `layer_idx`"):
        make(name, layer_idx=None)(x, past_key_values=cache, use_cache=True)
    with pytest.raises(AssertionError, match="attention_mask"):
        make(name)(x, attention_mask=torch.ones(2, 1, 4, 4), past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match="mode"):
        make(name, mode="parallel")
    with pytest.raises(ValueError, match="expand_v"):
        make(name, expand_v=0.3)
    assert len(cache) == 0


# The reference's numbers: outputs and input gradients equal, weight gradients within 5e-3.
@pytest.mark.parametrize("conv_bias", [False, True])
def test_one_convolution_over_q_k_v_is_three(conv_bias: bool, monkeypatch: pytest.MonkeyPatch):
    layer, x = make("GatedDeltaNet", conv_bias=conv_bias), torch.randn(2, 20, D, requires_grad=True)
    assert layer._use_fused_qkv_conv(None, False, None)
    assert not layer._use_fused_qkv_conv(None, True, None)
    wanted = [x, *layer.parameters()]
    fused = layer(x)[0]
    grads = torch.autograd.grad(fused.sin().sum(), wanted)
    monkeypatch.setattr(layer, "_use_fused_qkv_conv", lambda *args: False)
    plain = layer(x)[0]
    assert torch.equal(fused, plain)
    for a, b in zip(grads, torch.autograd.grad(plain.sin().sum(), wanted), strict=True):
        assert_close("grad", b, a, 1e-5)


# What a trainer hangs on one of the convolutions must run.
def test_a_hook_of_a_convolution_runs():
    layer, seen = make("GatedDeltaNet"), []
    layer.k_conv1d.register_forward_hook(lambda module, args, out: seen.append(out))
    layer(torch.randn(1, 5, D))
    assert len(seen) == 1


def test_state_dict_of_the_second_gated_deltanet():
    layer = make("GatedDeltaNet2", num_v_heads=4, expand_v=2)
    assert {name: list(p.shape) for name, p in layer.state_dict().items()} == {
        "A_log": [2],
        "dt_bias": [16],
        "q_proj.weight": [16, D],
        "k_proj.weight": [16, D],
        "v_proj.weight": [64, D],
        "q_conv1d.weight": [16, 1, 4],
        "k_conv1d.weight": [16, 1, 4],
        "v_conv1d.weight": [64, 1, 4],
        "f_proj.0.weight": [16, D],
        "f_proj.1.weight": [16, 16],
        "b_proj.weight": [16, D],
        "w_proj.weight": [64, D],
        "g_proj.0.weight": [16, D],
        "g_proj.1.weight": [64, 16],
        "g_proj.1.bias": [64],
        "o_norm.weight": [16],
        "o_proj.weight": [D, 64],
    }


@pytest.mark.parametrize(("name", "low"), [("GatedDeltaNet", 0), ("Comba", 0), ("GatedDeltaNet2", 1)])
def test_fresh_decays(name: str, low: float):
    torch.manual_seed(0)
    layer = getattr(layers, name)(hidden_size=D, head_dim=8, num_heads=64)
    rate, dt = layer.A_log.exp(), F.softplus(layer.dt_bias)
    assert ((rate >= low - 1e-5) & (rate <= 16 + 1e-4)).all()
    assert (rate < 1).any() == (low == 0)
    assert ((dt >= 0.99e-3) & (dt <= 0.101)).all()
    assert layer.A_log._no_weight_decay
    assert layer.dt_bias._no_weight_decay
    if name == "Comba":
        assert (layer.decay == 1).all()
        assert (layer.D == 1).all()


@pytest.mark.parametrize(
    ("name", "kwargs", "match"),
    [
        ("GatedDeltaNet", {"num_v_heads": 3}, "num_v_heads"),
        ("GatedDeltaNet", {"output_gate_activation": "relu"}, "output_gate_activation"),
        ("DeltaNet", {"num_heads": 5}, "num_heads"),
        ("DeltaNet", {"qk_activation": "gelu"}, "qk_activation"),
        ("DeltaNet", {"qk_norm": "l1"}, "qk_norm"),
    ],
)
def test_wrong_constructor_arguments_are_named(name: str, kwargs: dict, match: str):
    with pytest.raises(ValueError, match=match):
        make(name, **kwargs)


def test_a_mode_that_the_reference_gave_up():
    with pytest.raises(NotImplementedError, match="fused_chunk"):
        make("DeltaNet", mode="fused_chunk")


# The stack of a hand-built model resets its parts; the layer's own values must survive it.
def test_comba_comes_back_from_a_reset():
    layer = make("Comba", correction_factor=0.5)
    layer.reset_parameters()
    assert (layer.D == 0.5).all()
    assert (layer.decay == 1).all()
