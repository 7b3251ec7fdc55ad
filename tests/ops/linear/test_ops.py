# SPDX-License-Identifier: MIT
"""Public ops of the linear family: every form of an op gives the numbers of its recurrence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fla.ops.gla import chunk_gla, fused_chunk_gla, fused_recurrent_gla
from fla.ops.gla.naive import ceildiv, naive_recurrent_gla
from fla.ops.lightning_attn import chunk_lightning_attn, fused_recurrent_lightning_attn
from fla.ops.linear_attn import chunk_linear_attn, fused_chunk_linear_attn, fused_recurrent_linear_attn
from fla.ops.linear_attn.naive import naive_recurrent_linear_attn
from fla.ops.retention import (
    chunk_retention,
    fused_chunk_retention,
    fused_recurrent_retention,
    parallel_retention,
)
from fla.ops.retention.naive import naive_retention
from fla.ops.simple_gla import (
    chunk_simple_gla,
    fused_chunk_simple_gla,
    fused_recurrent_simple_gla,
    parallel_simple_gla,
)
from fla.ops.simple_gla import naive as simple_naive

PACKED = [0, 5, 5, 70, 77]
RETENTION = [math.log(1 - 2.0 ** (-5 - h)) for h in range(2)]
LIGHTNING = [-(8 / 2) * (1 - 1 / 4) * h for h in range(2)]


def plain(fn: Callable[..., Any], **fixed: Any) -> Callable[..., Any]:
    """The op as ``call(h0, **data) -> (o, state)``."""

    def call(h0=None, **data):
        return fn(**data, **fixed, initial_state=h0, output_final_state=True)

    return call


def gla(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda gk, **data: fn(**data, g=gk)


# Op -> (call, gates among the inputs, fixed log decay per head).
STATEFUL = {
    "chunk_simple_gla": (chunk_simple_gla, ("g",), None),
    "fused_chunk_simple_gla": (fused_chunk_simple_gla, ("g",), None),
    "fused_recurrent_simple_gla": (fused_recurrent_simple_gla, ("g",), None),
    "chunk_simple_gla-ungated": (chunk_simple_gla, (), None),
    "chunk_gla": (gla(chunk_gla), ("gk",), None),
    "fused_recurrent_gla": (fused_recurrent_gla, ("gk", "gv"), None),
    "fused_recurrent_gla-value": (fused_recurrent_gla, ("gv",), None),
    "chunk_retention": (chunk_retention, (), RETENTION),
    "fused_chunk_retention": (fused_chunk_retention, (), RETENTION),
    "fused_recurrent_retention": (fused_recurrent_retention, (), RETENTION),
    "chunk_lightning_attn": (lambda **kw: chunk_lightning_attn(**kw, layer_idx=1, num_layers=4), (), LIGHTNING),
    "fused_recurrent_lightning_attn": (
        lambda **kw: fused_recurrent_lightning_attn(**kw, layer_idx=1, num_layers=4),
        (),
        LIGHTNING,
    ),
    "chunk_linear_attn": (lambda **kw: chunk_linear_attn(**kw, normalize=False), (), None),
    "fused_chunk_linear_attn": (lambda **kw: fused_chunk_linear_attn(**kw, normalize=False), (), None),
    "fused_recurrent_linear_attn": (fused_recurrent_linear_attn, (), None),
}


def check(truth, name: str, data: dict[str, torch.Tensor], offsets=None, reverse=False, **options: Any) -> None:
    fn, _, decay = STATEFUL[name]
    if offsets is not None:
        options["cu_seqlens"] = torch.tensor(offsets)
    if reverse:
        options["reverse"] = True
    truth_options: dict[str, Any] = {"offsets": offsets, "reverse": reverse, "scale": options.get("scale")}
    if decay is not None:
        q = data["q"]
        truth_options["g"] = torch.tensor(decay, dtype=torch.float64).expand(q.shape[:3])
    truth.compare(plain(fn, **options), data, **truth_options)


@pytest.mark.parametrize("name", STATEFUL)
def test_op_equals_its_recurrence(truth, name) -> None:
    check(truth, name, truth.inputs(2, 77, 2, 12, 20, *STATEFUL[name][1]), scale=0.7)


@pytest.mark.parametrize("name", STATEFUL)
def test_packed_op_equals_its_recurrence(truth, name) -> None:
    check(truth, name, truth.inputs(1, 77, 2, 8, 8, *STATEFUL[name][1], N=4), offsets=PACKED)


@pytest.mark.parametrize("name", [n for n in STATEFUL if "recurrent" in n])
def test_reverse_op_equals_its_recurrence(truth, name) -> None:
    check(truth, name, truth.inputs(1, 77, 2, 8, 8, *STATEFUL[name][1], N=4), offsets=PACKED, reverse=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["chunk_simple_gla", "chunk_gla", "chunk_retention", "chunk_linear_attn"])
def test_odd_widths_in_every_dtype(truth, name, dtype) -> None:
    check(truth, name, truth.inputs(1, 70, 2, 33, 65, *STATEFUL[name][1], dtype=dtype))  # D04


@pytest.mark.parametrize("T", [0, 1, 2, 3, 15, 17])
@pytest.mark.parametrize("name", STATEFUL)
def test_short_sequences(truth, name, T) -> None:
    check(truth, name, truth.inputs(2, T, 2, 4, 6, *STATEFUL[name][1]))  # E04


@pytest.mark.parametrize("cut", [1, 30, 64])
@pytest.mark.parametrize("name", STATEFUL)
def test_a_run_resumes_from_its_state(truth, name, cut) -> None:
    fn, names, _ = STATEFUL[name]
    data = truth.inputs(2, 77, 2, 6, 6, *names)
    call, h0 = plain(fn), data.pop("h0")
    with torch.no_grad():
        o, S = call(h0, **data)
        first = call(h0, **{n: x[:, :cut] for n, x in data.items()})
        second = call(first[1], **{n: x[:, cut:] for n, x in data.items()})
    torch.testing.assert_close(torch.cat([first[0], second[0]], 1), o, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(second[1], S, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [n for n in STATEFUL if "recurrent" in n])
def test_reverse_is_forward_on_flipped_tokens(truth, name) -> None:
    fn, names, _ = STATEFUL[name]
    data = truth.inputs(2, 40, 2, 6, 6, *names)
    h0 = data.pop("h0")
    o, S = plain(fn, reverse=True)(h0, **data)
    o2, S2 = plain(fn)(h0, **{n: x.flip(1) for n, x in data.items()})
    assert torch.equal(o, o2.flip(1))
    assert torch.equal(S, S2)


@pytest.mark.parametrize(
    "fn", [chunk_simple_gla, fused_recurrent_simple_gla, gla(chunk_gla), fused_recurrent_gla, fused_recurrent_retention]
)
@pytest.mark.parametrize("T", [1, 40])
def test_value_first_states_are_transposes(truth, fn, T) -> None:
    # B07: a square, non-symmetric state, where no shape error would show a mix-up.
    name = {chunk_simple_gla: "g", fused_recurrent_simple_gla: "g", fused_recurrent_retention: None}.get(fn, "gk")
    data = truth.inputs(2, T, 2, 16, 16, *([name] if name else []))
    h0 = data.pop("h0")
    o, S = plain(fn)(h0, **data)
    o2, S2 = plain(fn, state_v_first=True)(h0.mT, **data)
    torch.testing.assert_close(o, o2, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(S, S2.mT, rtol=1e-5, atol=1e-6)


def test_one_token_packed_sequences_are_steps(truth) -> None:
    data = truth.inputs(1, 4, 2, 6, 6, "g", N=4)
    truth.compare(plain(fused_recurrent_simple_gla, cu_seqlens=torch.arange(5)), data, offsets=[0, 1, 2, 3, 4])


def test_fixed_decay_equals_the_same_gate(truth) -> None:
    data = truth.inputs(2, 70, 2, 8, 8)
    h0 = data.pop("h0")
    gamma = torch.tensor([-0.1, -3.0])
    for fn in (chunk_simple_gla, fused_chunk_simple_gla, fused_recurrent_simple_gla):
        o, S = plain(fn, g_gamma=gamma)(h0, **data)
        o2, S2 = plain(fn)(h0, g=gamma.expand(2, 70, 2), **data)
        torch.testing.assert_close(o, o2)
        torch.testing.assert_close(S, S2)


def test_a_chunk_size_changes_nothing(truth) -> None:
    data = truth.inputs(1, 100, 2, 8, 8, "g")
    h0 = data.pop("h0")
    want = chunk_simple_gla(**data, initial_state=h0)[0]
    for size in (16, 32, 64, 128, None):
        torch.testing.assert_close(chunk_simple_gla(**data, initial_state=h0, chunk_size=size)[0], want)


def test_simple_gla_is_gla_with_one_gate_for_all_channels(truth) -> None:
    data = truth.inputs(1, 70, 2, 8, 8, "g")
    g = data.pop("g")
    gla_data = {n: x for n, x in data.items() if n != "h0"}
    a = chunk_simple_gla(**gla_data, g=g)[0]
    b = chunk_gla(**gla_data, g=g.unsqueeze(-1).expand(1, 70, 2, 8))[0]
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["g", None])
def test_parallel_equals_chunk_and_its_scores_are_right(truth, name) -> None:
    data = truth.inputs(2, 40, 2, 8, 12, *([name] if name else []), gate="cut")
    del data["h0"]
    want = chunk_simple_gla(**data)[0]
    assert parallel_simple_gla(**data)[1] is None
    torch.testing.assert_close(parallel_simple_gla(**data)[0], want)
    o, A = parallel_simple_gla(**data, output_attentions=True)
    torch.testing.assert_close(o, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.einsum("bhij,bjhv->bihv", A, data["v"]), o, rtol=1e-4, atol=1e-5)
    assert not A.triu(1).any()


def test_scores_of_the_parallel_form_carry_gradients(truth) -> None:
    data = truth.inputs(1, 20, 2, 4, 4, "g", dtype=torch.float64)
    del data["h0"]
    _, A = parallel_simple_gla(**data, output_attentions=True)
    _, A2 = simple_naive.naive_parallel_simple_gla(**data)
    torch.testing.assert_close(A, A2)
    weight, leaves = torch.randn_like(A), [data[n] for n in ("q", "k", "g")]
    for a, b in zip(*(torch.autograd.grad((x * weight).sum(), leaves) for x in (A, A2)), strict=True):
        torch.testing.assert_close(a, b)


def test_parallel_packed_equals_separate_sequences(truth) -> None:
    data = truth.inputs(1, 77, 2, 8, 8, "g", N=4)
    del data["h0"]
    cu = torch.tensor(PACKED)
    want = truth.recurrence(**data, offsets=PACKED)[0]
    for options in ({}, {"cu_seqlens_cpu": cu.clone()}):
        torch.testing.assert_close(parallel_simple_gla(**data, cu_seqlens=cu, **options)[0], want, rtol=1e-4, atol=1e-5)
    del data["g"]
    torch.testing.assert_close(parallel_retention(**data, cu_seqlens=cu)[0], chunk_retention(**data, cu_seqlens=cu)[0])


def test_parallel_retention_scores() -> None:
    q, k, v = (torch.randn(1, 30, 2, 8) for _ in range(3))
    o, A = parallel_retention(q, k, v, output_attentions=True)
    want = naive_retention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    torch.testing.assert_close(o, want)
    torch.testing.assert_close(chunk_retention(q, k, v)[0], want, rtol=1e-4, atol=1e-5)
    assert A.shape == (1, 2, 30, 30)


def test_lightning_decay_at_the_ends() -> None:
    q, k, v = (torch.randn(1, 30, 3, 8) for _ in range(3))
    torch.testing.assert_close(chunk_lightning_attn(q, k, v, 4, 4)[0], chunk_linear_attn(q, k, v, normalize=False)[0])
    torch.testing.assert_close(fused_recurrent_lightning_attn(q, k, v, 0, 4)[0], chunk_lightning_attn(q, k, v, 0, 4)[0])


def test_naive_references_equal_the_recurrence(truth) -> None:
    data = truth.inputs(2, 70, 2, 6, 8, "g", "gk", dtype=torch.float64)
    q, k, v, g, gk, h0 = (data[n].detach() for n in ("q", "k", "v", "g", "gk", "h0"))
    for gate in (g, None):
        want = truth.recurrence(q, k, v, gate, h0=h0)
        close = lambda got, want: [torch.testing.assert_close(a, b) for a, b in zip(got, want[:2], strict=True)]
        close(simple_naive.naive_recurrent_simple_gla(q, k, v, gate, initial_state=h0), want)
        close(simple_naive.naive_chunk_simple_gla(q, k, v, gate, h0, True), want)
        o = truth.recurrence(q, k, v, gate)[0]
        torch.testing.assert_close(simple_naive.naive_parallel_simple_gla(q, k, v, gate)[0], o)
        assert simple_naive.naive_recurrent_simple_gla(q, k, v, gate, output_final_state=False)[1] is None
    close(naive_recurrent_gla(q, k, v, gk, h0, True), truth.recurrence(q, k, v, gk=gk, h0=h0))
    close(
        naive_recurrent_linear_attn(q, k, v, initial_state=h0, output_final_state=True),
        truth.recurrence(q, k, v, h0=h0),
    )
    half = simple_naive.naive_recurrent_simple_gla(q.half(), k.half(), v.half(), g)
    assert (half[0].dtype, half[1].dtype) == (torch.float16, torch.float32)
    assert ceildiv(7, 2) == 4


def test_mamba2_state_space_duality() -> None:
    torch.manual_seed(0)
    B, T, H, P, N = 1, 50, 2, 8, 16
    x, dt, A = torch.randn(B, T, H, P), torch.rand(B, T, H), -torch.rand(H)
    Bm, C = torch.randn(B, T, H, N), torch.randn(B, T, H, N)
    o, S = chunk_simple_gla(C, Bm, x * dt[..., None], A * dt, scale=1.0, output_final_state=True, state_v_first=True)
    h, rows = torch.zeros(B, H, P, N), []
    for t in range(T):
        h = h * (A * dt[:, t]).exp()[..., None, None] + torch.einsum("bh,bhp,bhn->bhpn", dt[:, t], x[:, t], Bm[:, t])
        rows.append(torch.einsum("bhpn,bhn->bhp", h, C[:, t]))
    torch.testing.assert_close(o, torch.stack(rows, 1), rtol=1e-4, atol=5e-4)
    torch.testing.assert_close(S, h, rtol=1e-4, atol=5e-4)


@pytest.mark.parametrize(
    "shape", [(0, 5, 2, 4, 4), (2, 5, 0, 4, 4), (2, 5, 2, 4, 0), (2, 20, 2, 0, 4), (0, 1, 2, 4, 4)]
)
def test_axes_of_no_length(shape) -> None:
    B, T, H, K, V = shape
    q, k, v = (torch.randn(B, T, H, D, requires_grad=True) for D in (K, K, V))
    for o, S in (
        chunk_gla(q, k, v, torch.zeros(B, T, H, K), scale=1.0, output_final_state=True),
        chunk_simple_gla(q, k, v, torch.zeros(B, T, H), scale=1.0, output_final_state=True),
    ):
        o.sum().backward()
        assert (o.shape, S.shape) == ((B, T, H, V), (B, H, K, V))
        assert not o.any()
    with pytest.raises(ValueError, match="scale"):
        chunk_retention(*[torch.randn(1, 2, 1, 0)] * 2, torch.randn(1, 2, 1, 4))


def test_offsets_edited_in_place_give_fresh_results() -> None:
    q = torch.randn(1, 20, 1, 4)
    cu = torch.tensor([0, 10, 20])
    before = chunk_retention(q, q, q, cu_seqlens=cu)[0]
    cu[1] = 5
    after = chunk_retention(q, q, q, cu_seqlens=cu)[0]
    assert not torch.equal(before, after)
    assert torch.equal(after, chunk_retention(q, q, q, cu_seqlens=torch.tensor([0, 5, 20]))[0])


def test_fused_chunk_gla_names_what_to_call() -> None:
    with pytest.raises(NotImplementedError, match="chunk_gla"):
        fused_chunk_gla(q=torch.randn(1, 1, 1, 1))
