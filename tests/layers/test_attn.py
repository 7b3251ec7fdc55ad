# SPDX-License-Identifier: MIT
"""Softmax attention against its formula in float64: windows, shared keys, packing, padding, caches."""

from __future__ import annotations

import itertools
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from fla.layers.attn import Attention
from fla.models.utils import Cache
from fla.modules import _softmax
from fla.modules._softmax import dense_attention, packed_attention
from fla.utils import assert_close

D = 32
SHAPES = [
    {},
    {"num_kv_heads": 2, "qkv_bias": True},
    {"num_kv_heads": 1, "window_size": 5, "qk_norm": True},
    {"window_size": 1, "rope_theta": 100.0},
]
every_shape = pytest.mark.parametrize("kwargs", SHAPES, ids=lambda k: "-".join(k) or "plain")


def make(dtype: torch.dtype = torch.float32, **kwargs: Any) -> Attention:
    torch.manual_seed(0)
    layer = Attention(hidden_size=D, num_heads=4, layer_idx=0, **kwargs)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.4)
    return layer.to(dtype)


def inputs(B: int = 2, T: int = 13) -> Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(1))


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Query by query: ``[T, H, K]`` queries at the end of ``[S, HK, K]`` keys."""
    G, out = q.shape[1] // k.shape[1], []
    k, v = (x.repeat_interleave(G, 1) for x in (k, v))
    for t in range(len(q)):
        last = len(k) - len(q) + t + 1
        first = 0 if window is None else max(0, last - window)
        p = torch.einsum("hk,shk->hs", q[t], k[first:last]) * q.shape[-1] ** -0.5
        out.append(torch.einsum("hs,shv->hv", p.softmax(-1), v[first:last]))
    return torch.stack(out)


def reference(layer: Attention, x: Tensor) -> Tensor:
    """The layer on one sequence ``[T, D]``."""
    q, k, v = (p(x).view(len(x), -1, layer.head_dim) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    if layer.qk_norm:
        q, k = (
            t * torch.rsqrt(t.square().mean(-1, keepdim=True) + n.eps) * n.weight
            for t, n in ((q, layer.q_norm), (k, layer.k_norm))
        )
    R = layer.head_dim // 2
    turn = torch.outer(torch.arange(len(x)).to(x), layer.rope_theta ** -(torch.arange(R).to(x) / R))[:, None]
    rotated = []
    for a, b in (q.split(R, -1), k.split(R, -1)):
        rotated.append(torch.cat((a * turn.cos() - b * turn.sin(), a * turn.sin() + b * turn.cos()), -1))
    return layer.o_proj(softmax_attention(*rotated, v, layer.window_size).flatten(1))


@every_shape
def test_output_and_gradients_of_the_formula(kwargs: dict[str, Any]):
    layer, exact, x = make(**kwargs), make(torch.float64, **kwargs), inputs()
    x.requires_grad_()
    wanted_x = x.detach().double().requires_grad_()
    o, weights, cache = layer(x)
    wanted = torch.stack([reference(exact, row) for row in wanted_x])
    assert (weights, cache) == (None, None)
    assert_close("o", wanted, o, 1e-5)
    o.sin().sum().backward()
    wanted.sin().sum().backward()
    assert_close("dx", wanted_x.grad, x.grad, 1e-5)
    for (name, a), b in zip(exact.named_parameters(), layer.parameters(), strict=True):
        assert_close(name, a.grad, b.grad, 1e-5, err_atol=1e-4)  # zero for queries in a window of one


@every_shape
def test_packed_sequences_are_separate_sequences(kwargs: dict[str, Any]):
    layer, x, cu = make(**kwargs), inputs(1, 23), torch.tensor([0, 7, 7, 8, 23])
    alone = torch.cat([layer(x[:, a:b])[0] for a, b in itertools.pairwise(cu.tolist()) if b > a], 1)
    mask = torch.ones(1, 23)
    mask[0, :3] = 0  # does not count beside boundaries
    assert_close("o", alone, layer(x, mask, cu_seqlens=cu)[0], 1e-5)
    batch = layer(x[:, :22].reshape(2, 11, D), cu_seqlens=torch.tensor([0, 4, 22], dtype=torch.int32))[0]
    assert_close("two rows", layer(x[:, 4:22])[0], batch.reshape(1, 22, D)[:, 4:], 1e-5)


@pytest.mark.parametrize("side", ["left", "right", "both"])
@every_shape
def test_padding_is_not_seen(kwargs: dict[str, Any], side: str):
    layer, x, mask = make(**kwargs), inputs(3, 11), torch.ones(3, 11, dtype=torch.long)
    for i, n in enumerate((0, 3, 8)):
        if side in ("left", "both"):
            mask[i, : (n + 1) // 2 if side == "both" else n] = 0
        if side in ("right", "both") and n:
            mask[i, -(n // 2 if side == "both" else n) :] = 0
    o, _, _ = layer(x, mask)
    assert (o[mask == 0] == 0).all()
    for i in range(3):
        assert_close("row", layer(x[i : i + 1, mask[i] == 1])[0], o[i : i + 1, mask[i] == 1], 1e-5)


# G05, G16: a window, left padding and a cache together.
@pytest.mark.parametrize("parts", [[13, 1, 1, 1], [6, 4, 1, 5], [1] * 16], ids=str)
@pytest.mark.parametrize("whole", [True, False])
@every_shape
def test_a_cache_continues_padded_rows(kwargs: dict[str, Any], parts: list[int], whole: bool):
    layer, x, mask, cache, t, out = make(**kwargs), inputs(3, 16), torch.ones(3, 16), Cache(), 0, []
    if parts[0] > 1 and whole:
        mask[1, :2], mask[2, :5] = 0, 0
    with torch.no_grad():
        for n in parts:
            out.append(layer(x[:, t : t + n], mask[:, : t + n] if whole else None, cache, use_cache=True)[0])
            t += n
            assert cache.get_seq_length() == t
        held = cache[0]["attn_state"]
        size = 16 if layer.window_size is None else layer.window_size
        assert [list(s.shape) for s in held] == [[3, size, layer.kv_dim]] * 2
        joined = torch.cat(out, 1)
        for i in range(3):
            alone = layer(x[i : i + 1, mask[i] == 1])[0]
            assert_close("row", alone, joined[i : i + 1, mask[i] == 1], 1e-5)


def test_a_mask_of_the_new_tokens_alone():
    layer, x, cache = make(window_size=4), inputs(2, 9), Cache()
    with torch.no_grad():
        layer(x[:, :5], past_key_values=cache, use_cache=True)
        o = layer(x[:, 5:], torch.ones(2, 4), cache)[0]
        assert cache.get_seq_length() == 5  # read, not written
        assert_close("o", layer(x)[0][:, 5:], o, 1e-5)
        step = layer(x[:, 5:6], torch.tensor([[1], [0]]), cache=cache)[0]
        assert_close("step", o[:1, :1], step[:1], 1e-5)
        assert (step[1] == 0).all()


def test_positions_beyond_the_tables():  # G10
    layer, x, cache = make(max_position_embeddings=4), inputs(1, 40), Cache()
    with torch.no_grad():
        wanted = layer(x)[0]
        layer(x[:, :30], past_key_values=cache, use_cache=True)
        for t in range(30, 40):
            o = layer(x[:, t : t + 1], past_key_values=cache, use_cache=True)[0]
            assert_close("o", wanted[:, t : t + 1], o, 1e-5)


@pytest.mark.parametrize("T", [0, 1])
def test_none_and_one_token(T: int):
    o, _, _ = make()(inputs(2, T))
    assert o.shape == (2, T, D)
    packed = make()(inputs(1, T), cu_seqlens=torch.tensor([0, 0, T]))[0]
    assert packed.shape == (1, T, D)


@pytest.mark.parametrize("window", [None, 3, 700])
def test_blocks_of_queries_join(monkeypatch: pytest.MonkeyPatch, window: int | None):
    q, k, v = (torch.randn(1, n, h, 8, dtype=torch.float64) for n, h in ((20, 4), (33, 2), (33, 2)))
    monkeypatch.setattr(_softmax, "BLOCK", 7)
    assert_close("o", softmax_attention(q[0], k[0], v[0], window)[None], dense_attention(q, k, v, window), 1e-10)


def test_autocast():
    layer, x, cache = make(num_kv_heads=2, qk_norm=True), inputs(), Cache()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        o = layer(x, past_key_values=cache, use_cache=True)[0]
        assert o.dtype == torch.bfloat16
        assert layer(x[:, :1], past_key_values=cache, use_cache=True)[0].dtype == torch.bfloat16
    assert_close("o", layer(x)[0], o.float(), 2e-2)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 5])
def test_compiled_layer_is_the_layer(window: int | None, packed: bool):
    layer, x = make(window_size=window, num_kv_heads=2), inputs(1, 23)
    kwargs = {"cu_seqlens": torch.tensor([0, 7, 23])} if packed else {}
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert_close("o", layer(x, **kwargs)[0], compiled(x, **kwargs)[0], 1e-5)


def test_what_cannot_be_is_named():
    for kwargs, match in (
        ({"num_heads": 3}, "num_heads"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"window_size": 0}, "window_size"),
    ):
        with pytest.raises(ValueError, match=match):
            Attention(**{"hidden_size": 32, "num_heads": 4, **kwargs})
    layer, x, cache = make(), inputs(1), Cache()
    with pytest.raises(ValueError, match="attention_mask"):
        layer(x, torch.ones(1, 1, 13, 13))
    with pytest.raises(ValueError, match="cu_seqlens"):
        layer(x, cu_seqlens=torch.tensor([0, 20]))
    layer(x, past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match="cu_seqlens"):
        layer(x, past_key_values=cache, cu_seqlens=torch.tensor([0, 13]))
    layer.layer_idx = None
    with pytest.raises(ValueError, match="requires `layer_idx`"):
        layer(x, past_key_values=Cache())


class Kernel:
    """Stands for a variable-length kernel: what flash-attn would be called with, computed by us."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, T: int, S: int, **rest: Any
    ) -> Tensor:
        self.calls.append({"T": T, "S": S, "dtype": cu_q.dtype, **rest})
        left = rest["window_size"][0]
        window = None if left < 0 else left + 1
        pairs = zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True)
        return torch.cat([softmax_attention(q[a:b], k[c:d], v[c:d], window) for a, b, c, d in pairs])


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel, module = Kernel(), types.ModuleType("flash_attn")
    module.flash_attn_varlen_func = kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(_softmax, "_fits", lambda q: True)
    monkeypatch.setitem(_softmax._NAMES, None, _softmax._find_kernel())
    return kernel


def test_flash_attn_is_called_where_it_is_installed(flash: Kernel):
    q, k, v = (torch.randn(1, 12, h, 8) for h in (4, 2, 2))
    cu = torch.tensor([0, 5, 12])
    ref = torch.cat([softmax_attention(q[0, a:b], k[0, a:b], v[0, a:b], 3) for a, b in ((0, 5), (5, 12))])
    assert_close("o", ref[None], packed_attention(q, k, v, cu, window=3), 1e-5)
    assert flash.calls == [{"T": 7, "S": 7, "dtype": torch.int32, "causal": True, "window_size": (2, 0)}]
    packed_attention(q, k, v, cu)
    assert flash.calls[1]["window_size"] == (-1, -1)
    o = dense_attention(q.view(2, 6, 4, 8), k.view(2, 6, 2, 8), v.view(2, 6, 2, 8), 4)
    assert_close("o", softmax_attention(q[0, :6], k[0, :6], v[0, :6], 4), o[0], 1e-5)
    assert flash.calls[2]["T"] == 6


@pytest.mark.parametrize("window", [None, 5])
def test_a_kernel_is_called_from_compiled_code_too(monkeypatch: pytest.MonkeyPatch, window: int | None):
    seen = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, T: int, S: int, width: int) -> Tensor:
        seen.append((T, S, width))
        return q * 2

    monkeypatch.setattr(_softmax, "_fits", lambda q: True)
    monkeypatch.setitem(_softmax._NAMES, None, "torch")
    monkeypatch.setitem(_softmax.KERNELS, "torch", kernel)
    layer, x = make(window_size=window, num_kv_heads=2), inputs(1, 23)
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    o = compiled(x, cu_seqlens=torch.tensor([0, 7, 23]))[0]
    assert seen == [(23, 23, window)]
    assert_close("o", layer(x, cu_seqlens=torch.tensor([0, 7, 23]))[0], o, 1e-5)


def test_the_kernel_of_torch_stands_in_for_flash_attn(monkeypatch: pytest.MonkeyPatch):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    seen: dict[str, Any] = {}

    def fake(query: Tensor, key: Tensor, value: Tensor, *args: Any, window_size: Any = None) -> Tensor:
        seen.update(window_size=window_size, heads=key.shape[1], lengths=args[2:])
        return query

    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr(varlen, "varlen_attn", fake)
    assert _softmax._find_kernel() == "torch"
    q, k = torch.randn(7, 4, 8), torch.randn(7, 2, 8)
    _softmax.KERNELS["torch"](q, k, k, torch.tensor([0, 7]), torch.tensor([0, 7]), 7, 7, 3)
    assert seen == {"window_size": (2, 0), "heads": 4, "lengths": (7, 7)}
    monkeypatch.setattr(varlen, "varlen_attn", lambda query, is_causal: None)
    assert _softmax._find_kernel() == ""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@every_shape
def test_on_the_gpu(kwargs: dict[str, Any], dtype: torch.dtype):
    """Dense, packed, padded and cached, against float64 on the CPU."""
    exact, layer, x = make(torch.float64, **kwargs), make(**kwargs), inputs(2, 40).to(dtype)
    with torch.no_grad():  # scores of a size that 16 bits can hold
        for p in layer.parameters():
            p.mul_(0.4)
    layer.to("cuda", dtype)
    exact.load_state_dict(layer.state_dict())
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-4
    mask = torch.ones(2, 40)
    mask[0, :9] = 0
    cu = torch.tensor([0, 7, 40, 80])
    for options in ({}, {"attention_mask": mask}, {"cu_seqlens": cu}):
        ours = x.cuda().requires_grad_()
        theirs = x.double().requires_grad_()
        on_gpu = {n: t.cuda() for n, t in options.items()}
        o, wanted = layer(ours, **on_gpu)[0], exact(theirs, **options)[0]
        assert_close("o", wanted.cuda(), o, tolerance)
        o.float().sin().sum().backward()
        wanted.sin().sum().backward()
        assert_close("dx", theirs.grad.cuda(), ours.grad, 2 * tolerance)
    with torch.no_grad():
        cache, parts = Cache(), []
        for a, b in ((0, 30), (30, 36), (36, 37), (37, 38), (38, 39), (39, 40)):
            parts.append(layer(x[:, a:b].cuda(), mask[:, :b].cuda(), cache, use_cache=True)[0])
        assert_close("cached", exact(x.double(), mask)[0].cuda(), torch.cat(parts, 1), tolerance)


@pytest.mark.gpu
def test_compiled_on_the_gpu():
    layer, x = make(window_size=16, num_kv_heads=2).to("cuda", torch.bfloat16), inputs(1, 40).to("cuda", torch.bfloat16)
    cu = torch.tensor([0, 7, 40], device="cuda")
    with torch.no_grad():
        for p in layer.parameters():
            p.mul_(0.4)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert_close("o", layer(x, cu_seqlens=cu)[0], compiled(x, cu_seqlens=cu)[0], 1e-2)
