# SPDX-License-Identifier: MIT
"""The normaliser of linear attention and its pair of states."""

from __future__ import annotations

import pytest
import torch

from fla.ops.linear_attn import chunk_linear_attn, fused_chunk_linear_attn, fused_recurrent_linear_attn
from fla.ops.linear_attn.naive import naive_chunk_linear_attn, naive_recurrent_linear_attn
from fla.ops.linear_attn.utils import normalize_with_z_state

FORMS = [
    chunk_linear_attn,
    fused_chunk_linear_attn,
    lambda *args, **kwargs: fused_recurrent_linear_attn(*args, **kwargs, normalize=True),
]
PACKED = [0, 5, 5, 70, 77]


def positive(truth, B: int, T: int, dtype: torch.dtype = torch.float32, N: int | None = None):
    data = truth.inputs(B, T, 2, 8, 6, dtype=dtype, N=N)
    data = {n: (x.detach().abs() if n in "qk" else x.detach()).requires_grad_() for n, x in data.items()}
    data["z0"] = torch.rand(N or B, 2, 8).requires_grad_()
    return data


@pytest.mark.parametrize("fn", FORMS)
@pytest.mark.parametrize("offsets", [None, PACKED], ids=str)
def test_normalised_outputs_states_and_gradients(truth, fn, offsets) -> None:
    data = positive(truth, 1, 77, N=None if offsets is None else 4)
    exact = {n: x.detach().double().requires_grad_() for n, x in data.items()}
    want = truth.recurrence(**exact, offsets=offsets, normalize=True)
    state = (data["h0"], data["z0"].unsqueeze(1))
    cu = None if offsets is None else torch.tensor(offsets)
    args = [data[n] for n in "qkv"]
    o, (S, z) = fn(*args, initial_state=state, output_final_state=True, cu_seqlens=cu)
    got = (o, S, z.squeeze(1))
    weights = [torch.randn_like(x) for x in want]
    sum((x * w).sum() for x, w in zip(want, weights, strict=True)).backward()
    sum((x.double() * w).sum() for x, w in zip(got, weights, strict=True)).backward()
    assert max(truth.error(a, b) for a, b in zip(got, want, strict=True)) < 1e-5
    assert max(truth.error(data[n].grad, exact[n].grad) for n in data) < 1e-5


def test_reverse_sums_from_the_right(truth) -> None:
    data = positive(truth, 1, 77, N=4)
    want = truth.recurrence(**data, offsets=PACKED, normalize=True, reverse=True)
    q, k, v = (data[n] for n in "qkv")
    o, (S, z) = fused_recurrent_linear_attn(
        q,
        k,
        v,
        initial_state=(data["h0"], data["z0"].unsqueeze(1)),
        output_final_state=True,
        reverse=True,
        normalize=True,
        cu_seqlens=torch.tensor(PACKED),
    )
    for a, b in zip((o, S, z.squeeze(1)), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_half_precision_keys_are_float32(truth, dtype) -> None:
    # A float16 sum over this many keys stops growing, and 1e-10 is zero in float16.
    q = k = torch.full((1, 3000, 1, 4), 4.0, dtype=dtype)
    v = torch.ones(1, 3000, 1, 2, dtype=dtype)
    o, (_, z) = chunk_linear_attn(q, k, v)
    assert o.dtype == dtype
    assert z.dtype == torch.float32
    torch.testing.assert_close(o.float(), torch.ones_like(o, dtype=torch.float32))
    assert z.eq(12000).all()
    zeros = chunk_linear_attn(torch.zeros_like(q), k, v)[0]
    assert zeros.isfinite().all()
    promoted = chunk_linear_attn(q, k, v, initial_state=(torch.zeros(1, 1, 4, 2), torch.ones(1, 1, 1, 4)))[0]
    assert promoted.dtype == dtype


@pytest.mark.parametrize("cut", [1, 33, 64])
def test_a_run_resumes_from_its_pair_of_states(truth, cut) -> None:
    data = positive(truth, 2, 77)
    q, k, v = (data[n] for n in "qkv")
    o, (S, z) = chunk_linear_attn(q, k, v, output_final_state=True)
    a, state = chunk_linear_attn(q[:, :cut], k[:, :cut], v[:, :cut], output_final_state=True)
    b, (S2, z2) = chunk_linear_attn(
        q[:, cut:], k[:, cut:], v[:, cut:], initial_state=list(state), output_final_state=True
    )
    for x, y in ((torch.cat([a, b], 1), o), (S2, S), (z2, z)):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_the_sum_of_keys_is_returned_unasked_and_either_state_may_be_missing(truth) -> None:
    data = positive(truth, 2, 20)
    q, k, v = (data[n] for n in "qkv")
    o, (state, z) = chunk_linear_attn(q, k, v)
    assert state is None
    torch.testing.assert_close(z, k.sum(1, keepdim=True))
    assert fused_recurrent_linear_attn(q, k, v)[1] is None
    only_z = chunk_linear_attn(q, k, v, initial_state=(None, z))[0]
    torch.testing.assert_close(only_z, chunk_linear_attn(q, k, v, initial_state=(data["h0"] * 0, z))[0])
    bare = chunk_linear_attn(q, k, v, initial_state=data["h0"])[0]
    torch.testing.assert_close(bare, chunk_linear_attn(q, k, v, initial_state=(data["h0"], z * 0))[0])
    assert not torch.equal(bare, o)


@pytest.mark.parametrize("T", [0, 1])
def test_short_normalised_sequences(truth, T) -> None:
    data = positive(truth, 2, T)
    q, k, v = (data[n] for n in "qkv")
    z0 = data["z0"].unsqueeze(1)
    o, (S, z) = chunk_linear_attn(q, k, v, initial_state=(data["h0"], z0), output_final_state=True)
    want = truth.recurrence(**data, normalize=True)
    for a, b in zip((o, S, z.squeeze(1)), want, strict=True):
        torch.testing.assert_close(a, b)


def test_normalising_apart_equals_normalising_inside(truth) -> None:
    data = positive(truth, 1, 77, N=4)
    q, k, v = (data[n] for n in "qkv")
    z0, cu = data["z0"].unsqueeze(1), torch.tensor(PACKED)
    o, S = chunk_linear_attn(q, k, v, scale=0.3, initial_state=data["h0"], normalize=False, cu_seqlens=cu)
    assert S is None
    o, z = normalize_with_z_state(o, q, k, 0.3, z0, False, cu)
    want, (_, want_z) = chunk_linear_attn(q, k, v, scale=0.3, initial_state=(data["h0"], z0), cu_seqlens=cu)
    torch.testing.assert_close(o, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(z, want_z)


def test_wrong_states_are_named(truth) -> None:
    data = positive(truth, 2, 20)
    q, k, v, h0 = (data[n] for n in ("q", "k", "v", "h0"))
    z0 = data["z0"].unsqueeze(1)
    with pytest.raises(ValueError, match="normalize=False"):
        chunk_linear_attn(q, k, v, initial_state=(h0, z0), normalize=False)
    with pytest.raises(ValueError, match=r"initial_state\[1\]"):
        chunk_linear_attn(q, k, v, initial_state=(h0, z0.squeeze(1)))
    with pytest.raises(ValueError, match=r"initial_state\[1\]"):
        chunk_linear_attn(q, k, v, initial_state=(h0, z0[:1]))
    with pytest.raises(ValueError, match="pair"):
        chunk_linear_attn(q, k, v, initial_state=(h0, z0, z0))


def test_naive_forms_equal_the_recurrence(truth) -> None:
    data = positive(truth, 1, 128, dtype=torch.float64)
    q, k, v = (data[n] for n in "qkv")
    for normalize in (False, True):
        want = truth.recurrence(q, k, v, normalize=normalize)[0]
        torch.testing.assert_close(naive_chunk_linear_attn(q, k, v, normalize=normalize), want)
        torch.testing.assert_close(naive_recurrent_linear_attn(q, k, v, normalize=normalize)[0], want)
    _, (_, z) = naive_recurrent_linear_attn(q, k, v, output_final_state=True, normalize=True)
    torch.testing.assert_close(z, k.sum(1, keepdim=True))
    with pytest.raises(ValueError, match="64"):
        naive_chunk_linear_attn(q[:, :5], k[:, :5], v[:, :5])
