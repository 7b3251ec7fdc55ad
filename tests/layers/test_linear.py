# SPDX-License-Identifier: MIT
"""The layers of linear attention against their formulas, token by token, and the contract of every recurrent layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fla.layers.gla import GatedLinearAttention
from fla.layers.gsa import GatedSlotAttention
from fla.layers.hgrn import HGRNAttention
from fla.layers.hgrn2 import HGRN2Attention
from fla.layers.linear_attn import LinearAttention
from fla.layers.multiscale_retention import MultiScaleRetention
from fla.layers.rwkv6 import RWKV6Attention
from fla.layers.simple_gla import SimpleGatedLinearAttention
from fla.models.utils import Cache
from fla.utils import assert_close

D = 24


def recurrence(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    """``S <- exp(log_decay) S + k v^T``, ``o = S^T q / sqrt(K)``; all ``[T, H, .]``, the decay broadcasts to K."""
    S, out = q.new_zeros(q.shape[1], q.shape[2], v.shape[2]), []
    for t in range(len(q)):
        S = S * log_decay[t].exp()[..., None] + k[t][..., None] * v[t][:, None]
        out.append(torch.einsum("hkv,hk->hv", S, q[t]) * q.shape[-1] ** -0.5)
    return torch.stack(out)


def branch(layer: Any, name: str, x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    p = getattr(layer, f"{name}_proj")(x)
    if layer.use_short_conv:
        conv = getattr(layer, f"{name}_conv1d")
        p = activation(F.conv1d(p.T[None], conv.weight, conv.bias, padding=3, groups=p.shape[1])[0, :, : len(x)].T)
    return p


def heads(x: Tensor, H: int, width: int) -> Tensor:
    x = x.view(len(x), -1, width)
    return x[:, [h * x.shape[1] // H for h in range(H)]]


def rms(x: Tensor, weight: Tensor | None) -> Tensor:
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    return x if weight is None else x * weight


def qkv(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    H, f = layer.num_heads, {"relu": F.relu, None: lambda t: t}[layer.feature_map]
    q, k, v = (branch(layer, n, x, F.silu) for n in "qkv")
    return heads(f(q), H, layer.head_k_dim), heads(f(k), H, layer.head_k_dim), heads(v, H, layer.head_v_dim)


def gated(layer: Any, x: Tensor, o: Tensor) -> Tensor:
    norm = getattr(layer, "g_norm_swish_gate", None) or layer.g_norm
    o = rms(o, norm.weight)
    if layer.use_output_gate:
        act = torch.sigmoid if layer.gate_fn.__name__ == "sigmoid" else F.silu
        o = o * act(layer.g_proj(x)).view_as(o)
    return layer.o_proj(o.flatten(-2))


def gla(layer: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(layer, x)
    g = F.logsigmoid(layer.gk_proj(x)) / layer.gate_logit_normalizer
    if layer.clamp_min is not None:
        g = g.clamp(min=layer.clamp_min)
    return gated(layer, x, recurrence(q, k, v, heads(g, layer.num_heads, layer.head_k_dim)))


def hgrn2(layer: Any, x: Tensor, bound: Tensor | None = None) -> Tensor:
    q, f, i = (branch(layer, n, x, lambda t: t).view(len(x), layer.num_heads, -1) for n in "qfi")
    f = torch.sigmoid(f)
    if bound is not None:
        bound = bound.view(layer.num_heads, -1)
        f = bound + (1 - bound) * f
    o = recurrence(F.silu(q), 1 - f, i, f.log()).flatten(-2)
    return layer.o_proj(rms(o, layer.g_norm.weight))


def retention(layer: Any, x: Tensor) -> Tensor:
    q, k, v = qkv(layer, x)
    R, T = layer.head_k_dim // 2, torch.arange(len(x), dtype=x.dtype)
    turn = torch.outer(T, 10000.0 ** (-torch.arange(R, dtype=x.dtype) / R))[:, None]
    q, k = (
        torch.cat(
            (t[..., :R] * turn.cos() - t[..., R:] * turn.sin(), t[..., :R] * turn.sin() + t[..., R:] * turn.cos()), -1
        )
        for t in (q, k)
    )
    decay = torch.log1p(-(2.0 ** (-5 - torch.arange(layer.num_heads, dtype=x.dtype))))
    return gated(layer, x, recurrence(q, k, v, decay[None, :, None].expand(len(x), -1, -1)))


def simple_gla(layer: Any, x: Tensor) -> Tensor:
    g = F.logsigmoid(layer.gk_proj(x)) / layer.gate_logit_normalizer
    return gated(layer, x, recurrence(*qkv(layer, x), g[..., None]))


def hgrn(layer: Any, x: Tensor, bound: Tensor | None = None) -> Tensor:
    i, f = (branch(layer, n, x, lambda t: t) for n in "if")
    f = torch.sigmoid(f)
    if bound is not None:
        f = bound + (1 - bound) * f
    h, out = torch.zeros_like(f[0]), []
    for t in range(len(x)):
        h = f[t] * h + (1 - f[t]) * F.silu(i[t])
        out.append(h)
    return layer.o_proj(rms(torch.stack(out), layer.g_norm.weight) * F.silu(layer.g_proj(x)))


def gsa(layer: Any, x: Tensor) -> Tensor:
    H, phi = layer.num_heads, {"swish": F.silu, "relu": F.relu, None: lambda t: t}
    q, k, v = (branch(layer, n, x, F.silu) for n in "qkv")
    q, k = (t.view(len(x), -1, layer.head_k_dim) for t in (q, k))
    kind = getattr(layer.feature_map, "layer", None)
    if kind is not None:
        q, k = F.relu(q @ kind.weight.T), F.relu(k @ kind.weight.T)
    else:
        f = {"SwishFeatureMap": "swish", "ReLUFeatureMap": "relu"}.get(type(layer.feature_map).__name__)
        q, k = phi[f](q), phi[f](k)
    g = torch.sigmoid(layer.f_proj(x)) ** (1 / layer.gate_logit_normalizer)
    q, k, v, g = (heads(t.flatten(1), H, w) for t, w in zip((q, k, F.silu(v), g), sizes(layer), strict=True))
    Hk, Hv = x.new_zeros(H, q.shape[2], g.shape[2]), x.new_zeros(H, g.shape[2], v.shape[2])
    out = []
    for t in range(len(x)):
        Hk = Hk * g[t][:, None] + k[t][..., None] * (1 - g[t])[:, None]
        Hv = Hv * g[t][..., None] + (1 - g[t])[..., None] * v[t][:, None]
        p = torch.softmax(layer.scale * torch.einsum("hk,hkm->hm", q[t], Hk), -1)
        out.append(torch.einsum("hm,hmv->hv", p, Hv))
    return layer.o_proj(rms(F.silu(torch.stack(out).flatten(1)), layer.g_norm.weight))


def sizes(layer: Any) -> tuple[int, int, int, int]:
    return layer.head_k_dim, layer.head_k_dim, layer.head_v_dim, layer.num_slots


def linear(layer: Any, x: Tensor) -> Tensor:
    q, k, v = (branch(layer, n, x, F.silu) for n in "qkv")
    H, K = layer.num_heads, layer.head_k_dim
    q, k, v = heads(q, H, K), heads(k, H, K), heads(v, H, layer.head_v_dim)

    def phi(m: Any, t: Tensor) -> Tensor:
        kind = type(m).__name__
        if kind == "HadamardFeatureMap":
            return (t @ m.layer1.weight.T + m.layer1.bias) * (t @ m.layer2.weight.T + m.layer2.bias)
        if kind == "HedgehogFeatureMap":
            h = t @ m.layer.weight.T + m.layer.bias
            return torch.softmax(torch.cat([2 * h, -2 * h], -1), -1)
        if kind == "DPFPFeatureMap":
            r = torch.cat([F.relu(t), F.relu(-t)], -1)
            return torch.cat([r * torch.roll(r, j, -1) for j in (1, 2, 3, 4)], -1)
        return F.relu(t @ m.layer.weight.T) if kind == "T2RFeatureMap" else F.elu(t) + 1

    q, k = phi(layer.feature_map_q, q), phi(layer.feature_map_k, k)
    q = q / (q.sum(-1, keepdim=True) + 1e-4) if layer.norm_q else q
    k = k / (k.sum(-1, keepdim=True) + 1e-4) if layer.norm_k else k
    o = recurrence(q, k, v, x.new_zeros(len(x), H, 1))
    if layer.do_feature_map_norm:
        o = o / (recurrence(q, k, x.new_ones(len(x), H, 1), x.new_zeros(len(x), H, 1)) + 1e-10)
    o = o if isinstance(layer.norm, torch.nn.Identity) else rms(o, layer.norm.weight)
    return layer.o_proj(o.flatten(1))


def rwkv6(layer: Any, x: Tensor) -> Tensor:
    H, delta = layer.num_heads, F.pad(x, (0, 0, 1, 0))[:-1] - x
    first, last = layer.x_proj[0], layer.x_proj[2]
    low = torch.tanh((x + delta * first.mu) @ first.linear.weight.T).chunk(5, -1)
    mu = [a @ w.T + b for a, w, b in zip(low, last.weight.chunk(5, -1), layer.x_bias, strict=True)]
    inputs = dict(zip("rwkvg", (x + delta * m for m in mu), strict=True))
    r, k, v, g = (inputs[n] @ getattr(layer, f"{n}_proj").linear.weight.T for n in "rkvg")
    a, b = layer.w_proj.linear.lora[0], layer.w_proj.linear.lora[2]
    w = torch.tanh(inputs["w"] @ a.weight.T) @ b.weight.T + b.bias
    r, k, v, w = (t.view(len(x), H, -1) for t in (r, k, v, w))
    S, out = x.new_zeros(H, r.shape[2], v.shape[2]), []
    for t in range(len(x)):
        new = k[t][..., None] * v[t][:, None]
        out.append(torch.einsum("hkv,hk->hv", S + layer.bonus[..., None] * new, r[t]))
        S = S * torch.exp(-torch.exp(w[t]))[..., None] + new
    o = F.group_norm(torch.stack(out).flatten(1), H, layer.g_norm.weight, layer.g_norm.bias, 1e-5)
    return layer.o_proj(o * F.silu(g))


class Case(NamedTuple):
    cls: type
    formula: Callable[[Any, Tensor], Tensor]
    kwargs: dict[str, Any]
    variants: tuple[dict[str, Any], ...]
    state: tuple[Any, ...]  # shape, or shapes, for two sequences


CASES = {
    "gla": Case(
        GatedLinearAttention,
        gla,
        {"num_heads": 2},
        (
            {"num_heads": 4, "num_kv_heads": 2, "expand_k": 1.0, "feature_map": "relu"},
            {"use_short_conv": True, "conv_bias": True, "gate_fn": "sigmoid", "clamp_min": -0.03},
            {"use_output_gate": False, "gate_logit_normalizer": 1, "mode": "fused_chunk"},
            {"fuse_norm": False, "elementwise_affine": False},
        ),
        (2, 2, 12, 6),
    ),
    "gsa": Case(
        GatedSlotAttention,
        gsa,
        {"num_heads": 2, "num_slots": 5},
        (
            {"num_heads": 4, "num_kv_heads": 2, "feature_map": "t2r", "use_short_conv": True, "conv_bias": True},
            {"feature_map": "relu", "scale": 0.3, "gate_logit_normalizer": 1, "num_slots": None, "expand_v": 0.5},
            {"feature_map": None, "elementwise_affine": False},
        ),
        ((2, 2, 12, 5), (2, 2, 5, 12)),
    ),
    "hgrn": Case(HGRNAttention, hgrn, {}, ({"expand_ratio": 2}, {"use_short_conv": True, "conv_bias": True}), (2, 24)),
    "linear": Case(
        LinearAttention,
        linear,
        {"num_heads": 2},
        (
            {"num_heads": 4, "num_kv_heads": 2, "feature_map": "hedgehog", "norm_q": True, "norm_k": True},
            {"feature_map": "dpfp", "tie_feature_map_qk": True, "expand_v": 0.5},
            {"feature_map": "elu", "do_feature_map_norm": True, "output_norm": "identity", "mode": "fused_chunk"},
            {"feature_map": "t2r", "mode": "fused_recurrent"},
        ),
        (2, 2, 12, 12),
    ),
    "rwkv6": Case(
        RWKV6Attention,
        rwkv6,
        {"num_heads": 2, "proj_low_rank_dim": 3, "gate_low_rank_dim": 5},
        ({"expand_k": 1.0, "expand_v": 0.5},),
        (2, 2, 6, 12),
    ),
    "hgrn2": Case(
        HGRN2Attention,
        hgrn2,
        {"expand_ratio": 8},
        ({"use_short_conv": True, "conv_bias": True}, {"num_heads": 2, "expand_ratio": None, "mode": "fused_chunk"}),
        (2, 3, 8, 8),
    ),
    "retention": Case(
        MultiScaleRetention,
        retention,
        {"num_heads": 2},
        (
            {"num_heads": 6, "num_kv_heads": 2, "feature_map": "relu", "use_short_conv": True},
            {"mode": "parallel", "gate_fn": "sigmoid"},
            {"mode": "fused_chunk", "use_output_gate": False},
        ),
        (2, 2, 12, 24),
    ),
    "simple_gla": Case(
        SimpleGatedLinearAttention,
        simple_gla,
        {"num_heads": 2},
        (
            {"num_heads": 4, "num_kv_heads": 2, "feature_map": "relu", "use_short_conv": False},
            {"gate_fn": "sigmoid", "conv_bias": True, "mode": "fused_recurrent"},
        ),
        (2, 2, 12, 12),
    ),
}
every_layer = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
every_variant = pytest.mark.parametrize(
    ("case", "variant"),
    [pytest.param(c, v, id=f"{name}-{i}") for name, c in CASES.items() for i, v in enumerate(({}, *c.variants))],
)


def make(case: Case, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    layer = case.cls(**{"hidden_size": D, "layer_idx": 0, **case.kwargs, **kwargs})
    with torch.no_grad():  # nothing that counts may be zero
        for name, p in layer.named_parameters():
            if name.endswith((".mu", "x_bias", "bonus")):
                p.uniform_(0, 1)
    return layer


@every_variant
@pytest.mark.parametrize("length", [21, 70])
@pytest.mark.parametrize("grad", [True, False])
def test_layer_matches_its_formula(case: Case, variant: dict, length: int, grad: bool):
    layer, x = make(case, **variant).eval(), torch.randn(2, length, D)
    with torch.set_grad_enabled(grad):
        y = layer(x)[0]
    with torch.no_grad():
        ref = torch.stack([case.formula(layer.double(), row) for row in x.double()])
    assert_close("y", ref, y.double(), 2e-5)


@every_variant
def test_gradients_match_the_formula(case: Case, variant: dict):
    layer, x = make(case, **variant).double(), torch.randn(1, 13, D, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(1, 13, D, dtype=torch.float64)
    names, wanted = zip(("x", x), *layer.named_parameters(), strict=True)
    got = torch.autograd.grad((layer(x)[0] * dy).sum(), wanted)
    ref = torch.autograd.grad((case.formula(layer, x[0])[None] * dy).sum(), wanted)
    for name, e, g in zip(names, ref, got, strict=True):
        assert_close(name, e, g, 1e-5)


@every_layer
@pytest.mark.parametrize("length", [9, 70])
def test_prefill_and_decoding_give_what_one_pass_gives(case: Case, length: int):
    for mode in case.cls.modes:
        layer, x, cache = make(case, mode=mode).eval(), torch.randn(2, length + 3, D), Cache()
        with torch.no_grad():
            full = layer(x)[0]
            parts = [layer(x[:, :length], past_key_values=cache, use_cache=True)[0]]
            for t in range(length, length + 3):
                parts.append(layer(x[:, t : t + 1], past_key_values=cache, use_cache=True)[0])
        assert_close(mode, full, torch.cat(parts, 1), 2e-5)
        assert cache.get_seq_length() == length + 3
        states = cache[0]["recurrent_state"]
        states, shapes = (states, case.state) if isinstance(states, tuple) else ((states,), (case.state,))
        assert [(tuple(s.shape), s.dtype) for s in states] == [(shape, torch.float32) for shape in shapes]


@every_layer
@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_padding_changes_nothing(case: Case, side: str):
    layer, x, mask = make(case), torch.randn(2, 8, D), torch.ones(2, 8, dtype=torch.long)
    mask[0, {"left": slice(0, 3), "right": slice(6, 8), "middle": slice(2, 5)}[side]] = 0
    y = layer(x, attention_mask=mask)[0]
    assert_close("y", layer(x[:1, mask[0] == 1])[0], y[:1, mask[0] == 1], 1e-5)
    assert_close("y", layer(x[1:])[0], y[1:], 1e-5)
    assert (y[0, mask[0] == 0] == 0).all()


@every_layer
def test_masked_decoding_gives_what_each_row_gives_alone(case: Case):
    layer, x, mask, cache = make(case).eval(), torch.randn(2, 9, D), torch.ones(2, 9, dtype=torch.long), Cache()
    mask[0, :3] = 0
    with torch.no_grad():
        parts = []
        for a, b in ((0, 6), (6, 7), (7, 9)):
            part = layer(x[:, a:b], attention_mask=mask[:, :b], past_key_values=cache, use_cache=True)[0]
            parts.append(part)
        y = torch.cat(parts, 1)
        assert_close("y", layer(x[:1, 3:])[0], y[:1, 3:], 1e-5)
        assert_close("y", layer(x[1:])[0], y[1:], 1e-5)


@every_layer
def test_packed_sequences_give_what_each_gives_alone(case: Case):
    layer, x = make(case), torch.randn(1, 12, D, requires_grad=True)
    y = layer(x, cu_seqlens=torch.tensor([0, 5, 5, 12]), attention_mask=torch.ones(1, 12))[0]
    ref = torch.cat([layer(x[:, :5])[0], layer(x[:, 5:])[0]], 1)
    assert_close("y", ref, y, 1e-5)
    dy, wanted = torch.randn_like(y), [x, *layer.parameters()]
    for e, g in zip(*(torch.autograd.grad((out * dy).sum(), wanted) for out in (ref, y)), strict=True):
        assert_close("grad", e, g, 1e-4)


@every_layer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(case: Case, dtype: torch.dtype):
    layer, x = make(case), torch.randn(2, 20, D)
    with torch.autocast("cpu", dtype=dtype):
        y = layer(x)[0]
    assert y.dtype == dtype
    y.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    assert_close("y", layer(x)[0], y.float(), 3e-2)


@every_layer
def test_wrong_calls_are_named_and_leave_the_cache_alone(case: Case):
    layer, x, cache = make(case), torch.randn(2, 4, D), Cache()
    with pytest.raises(ValueError, match="requires `layer_idx`"):
        make(case, layer_idx=None)(x, past_key_values=cache, use_cache=True)
    with pytest.raises(AssertionError, match="attention_mask"):
        layer(x, attention_mask=torch.ones(2, 1, 4, 4), past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match="cu_seqlens"):
        layer(x[:1], cu_seqlens=torch.tensor([0, 3]), past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match="mode"):
        make(case, mode="quick")
    assert len(cache) == 0
    assert layer(x[:, :0])[0].shape == (2, 0, D)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"expand_k": 0.3}, "expand_k"),
        ({"num_heads": 5}, "num_heads"),
        ({"feature_map": "swishy"}, "feature_map"),
        ({"gate_fn": "swishy"}, "gate_fn"),
    ],
)
def test_wrong_constructor_arguments_are_named(kwargs: dict, match: str):
    with pytest.raises(ValueError, match=match):
        make(CASES["gla"], **kwargs)


@pytest.mark.parametrize(("name", "formula"), [("hgrn", hgrn), ("hgrn2", hgrn2)])
def test_gates_forget_no_more_than_the_lower_bound(name: str, formula: Any):
    layer, bound = make(CASES[name], layer_idx=1).double(), torch.rand(D, dtype=torch.float64)
    x = torch.randn(1, 13, D, dtype=torch.float64)
    with torch.no_grad():
        assert_close("y", formula(layer, x[0], bound)[None], layer(x, lower_bound=bound)[0], 1e-6)
        first = make(CASES[name], layer_idx=0).double()
        assert torch.equal(first(x)[0], first(x, lower_bound=bound)[0])


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"expand_ratio": 7}, "expand_ratio"),
        ({"expand_ratio": None, "num_heads": 5}, "num_heads"),
        ({"expand_ratio": None}, "expand_ratio"),
    ],
)
def test_wrong_sizes_of_hgrn2_are_named(kwargs: dict, match: str):
    with pytest.raises(ValueError, match=match):
        make(CASES["hgrn2"], **kwargs)


@pytest.mark.parametrize(
    ("name", "kwargs", "match"),
    [
        ("hgrn", {"expand_ratio": 0}, "expand_ratio"),
        ("gsa", {"feature_map": "elu"}, "feature_map"),
        ("linear", {"feature_map": "swish"}, "feature_map"),
        ("linear", {"output_norm": "layernorm"}, "output_norm"),
        ("rwkv6", {"expand_k": 0.3}, "expand_k"),
        ("rwkv6", {"gate_fn": "swishy"}, "gate_fn"),
    ],
)
def test_wrong_arguments_of_these_layers_are_named(name: str, kwargs: dict, match: str):
    with pytest.raises(ValueError, match=match):
        make(CASES[name], **kwargs)


class _Adapted(torch.nn.Module):
    """A projection of another class, which has to be called."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base, self.weight = base, base.weight

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.base(x)


def test_gated_slots_have_a_feature_map():
    names = {n: type(make(CASES["gsa"], feature_map=n).feature_map).__name__ for n in ("swish", "relu", "t2r", None)}
    assert [*names.values()] == ["SwishFeatureMap", "ReLUFeatureMap", "T2RFeatureMap", "NoneType"]


def test_rwkv6_calls_an_adapter_of_the_five_maps():
    layer, x = make(CASES["rwkv6"]), torch.randn(2, 9, D)
    with torch.no_grad():
        layer.x_proj[2].weight.mul_(2)
        ref = layer(x)[0]
        layer.x_proj[2].weight.div_(2)
        layer.x_proj[2] = _Adapted(layer.x_proj[2])
        assert_close("y", ref, layer(x)[0], 1e-5)


def test_simple_gla_has_the_defaults_of_the_reference():
    defaults = {name: p.default for name, p in inspect.signature(SimpleGatedLinearAttention).parameters.items()}
    wanted = {"mode": "chunk", "hidden_size": 1024, "expand_k": 1.0, "expand_v": 1.0, "num_heads": 4}
    wanted |= {"num_kv_heads": None, "feature_map": None, "use_short_conv": True, "conv_size": 4, "conv_bias": False}
    wanted |= {"gate_fn": "swish", "elementwise_affine": True, "norm_eps": 1e-5, "gate_logit_normalizer": 16}
    wanted |= {"fuse_norm": True, "layer_idx": None}
    assert list(defaults.items()) == list(wanted.items())
