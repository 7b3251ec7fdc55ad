# SPDX-License-Identifier: MIT
"""Rotary embedding against complex multiplication in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fla.modules.rotary import RotaryEmbedding, rotary_embedding, rotary_embedding_fwdbwd, rotary_embedding_ref
from fla.utils import assert_close


def reference(x: Tensor, positions: Tensor, R: int, interleaved: bool = False, base: float = 10000.0) -> Tensor:
    """``x`` ``[B, T, H, D]`` float64, ``positions`` ``[B, T]``."""
    angle = positions.double()[..., None, None] * base ** (-torch.arange(R, dtype=torch.float64) / R)
    part = x[..., : 2 * R]
    a, b = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    z = torch.complex(a, b) * torch.polar(torch.ones_like(angle), angle)
    out = torch.stack((z.real, z.imag), -1).flatten(-2) if interleaved else torch.cat((z.real, z.imag), -1)
    return torch.cat((out, x[..., 2 * R :]), -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [16, 8])
@pytest.mark.parametrize("offset", [0, 7])
def test_dense(interleaved: bool, dim: int, offset: int):
    q, k = torch.randn(2, 20, 4, 16, requires_grad=True), torch.randn(2, 20, 2, 16)
    out = RotaryEmbedding(dim, interleaved=interleaved)(q, k, seqlen_offset=offset)
    positions = (torch.arange(20) + offset).expand(2, -1)
    refs = [reference(t.double(), positions, dim // 2, interleaved) for t in (q, k)]
    for ref, y in zip(refs, out, strict=True):
        assert_close("y", ref, y.double(), 1e-5)
    dy = torch.randn_like(q)
    (e,), (g,) = (torch.autograd.grad((y * dy).sum(), q) for y in (refs[0], out[0]))
    assert_close("dq", e, g, 1e-5)


# V07: tables of the longest document are enough, and positions restart.
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_positions_restart(dtype: torch.dtype):
    x, cu = torch.randn(1, 20, 2, 16), torch.tensor([0, 8, 8, 20], dtype=dtype)
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    rotary = RotaryEmbedding(16)
    assert_close("y", reference(x.double(), positions, 8), rotary(x, x, cu_seqlens=cu)[0].double(), 1e-5)
    assert rotary._seq_len_cached == 12
    cos, sin = rotary._cos_cached, rotary._sin_cached
    assert cos is not None
    assert sin is not None
    assert torch.equal(rotary_embedding(x, cos, sin, cu_seqlens=cu), rotary(x, x, cu_seqlens=cu)[0])
    offsets = torch.tensor([3, 0, 1], dtype=dtype)
    y = rotary(x, x, seqlen_offset=offsets, cu_seqlens=cu, max_seqlen=13)[0]
    shift = torch.cat([torch.full((8,), 3), torch.full((12,), 1)])
    assert_close("y", reference(x.double(), positions + shift, 8), y.double(), 1e-5)


def test_left_padding_is_zero_and_stays_in_place():
    x, offsets = torch.randn(2, 6, 2, 16), torch.tensor([-4, 0])
    rotary = RotaryEmbedding(8)
    y = rotary(x, x, seqlen_offset=offsets, max_seqlen=6)[0]
    assert (y[0, :4, :, :8] == 0).all()
    assert torch.equal(y[..., 8:], x[..., 8:])
    assert_close("y", reference(x[:1, 4:].double(), torch.arange(2)[None], 4), y[:1, 4:].double(), 1e-5)
    z = x.clone()
    out = rotary_embedding(z, rotary._cos_cached, rotary._sin_cached, inplace=True, seqlen_offsets=offsets)
    assert out is z
    assert torch.equal(z[0, :4], x[0, :4])
    assert torch.equal(z[1], y[1])


def test_the_conjugate_rotates_back_and_bfloat16_is_near():
    x, rotary = torch.randn(1, 9, 2, 16), RotaryEmbedding(16)
    y = rotary(x, x)[0]
    cos, sin = rotary._cos_cached, rotary._sin_cached
    assert_close("x", x, rotary_embedding_fwdbwd(y, cos, sin, conjugate=True), 1e-6)
    assert_close("y", y, rotary_embedding_ref(x, cos, sin), 1e-6)
    half = rotary(x.bfloat16(), x.bfloat16())[0]
    assert half.dtype == torch.bfloat16
    assert_close("half", y, half.float(), 1e-2)
    assert not rotary.state_dict()
    assert rotary.bfloat16().inv_freq.dtype == torch.float32


def test_xpos_scores_fall_with_distance_only():
    q = torch.randn(1, 1, 1, 16).expand(1, 12, 1, 16)
    a, b = RotaryEmbedding(16, scale_base=512)(q, q)
    scores = torch.einsum("btd,bsd->ts", a[:, :, 0], b[:, :, 0])
    assert_close("scores", scores[3, 1], scores[9, 7], 1e-5)


def test_inference_tables_are_made_again_for_training():
    rotary = RotaryEmbedding(16)
    with torch.inference_mode():
        rotary(torch.randn(1, 4, 1, 16), torch.randn(1, 4, 1, 16))
    q = torch.randn(1, 4, 1, 16, requires_grad=True)
    rotary(q, q)[0].sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"cos": torch.ones(3, 4)}, "cos"),
        ({"cos": torch.ones(4, 4), "sin": torch.ones(4, 4)}, "cos"),
        ({"cos": torch.ones(5, 9), "sin": torch.ones(5, 9)}, "columns"),
        ({"cos": torch.ones(5, 4).half()}, "dtype"),
        ({"seqlen_offsets": 1}, "positions"),
        ({"seqlen_offsets": torch.tensor([0, 1])}, "positions"),
        ({"seqlen_offsets": torch.tensor([0])}, "seqlen_offsets"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "cu_seqlens"),
    ],
)
def test_wrong_arguments_are_named(kwargs: dict, match: str):
    with pytest.raises(ValueError, match=match):
        rotary_embedding(torch.randn(2, 5, 1, 16), **{"cos": torch.ones(5, 4), "sin": torch.ones(5, 4), **kwargs})
    with pytest.raises(ValueError, match="dim"):
        RotaryEmbedding(7)
    with pytest.raises(ValueError, match="max_seqlen"):
        RotaryEmbedding(8)(torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8), seqlen_offset=torch.tensor([0]))


def test_tables_reach_to_the_longer_of_queries_and_keys() -> None:
    rotary = RotaryEmbedding(8)
    q, k = torch.randn(1, 4, 1, 8), torch.randn(1, 7, 1, 8)
    got = rotary(q, k)
    assert torch.equal(got[0], RotaryEmbedding(8)(q, q)[0])
    assert torch.equal(got[1], RotaryEmbedding(8)(k, k)[1])


def test_tables_grow_with_offsets_that_can_be_read() -> None:
    rotary = RotaryEmbedding(8)
    x = torch.randn(2, 6, 1, 8)
    want = rotary(x, x)[0]
    rotary = RotaryEmbedding(8)
    rotary(x[:, :4], x[:, :4])
    step = torch.stack([x[0, 5:6], x[1, 2:3]])
    got = rotary(step, step, torch.tensor([5, 2]))[0]
    assert torch.allclose(got, torch.stack([want[0, 5:6], want[1, 2:3]]), atol=1e-6)
