# SPDX-License-Identifier: MIT
"""The vector-decay kernels in the interpreter, forward and backward, against the token recurrence in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import itertools

from vector_reference import make_inputs, ratio, with_gradients

from fla.ops._delta import vector_work
from fla.ops._delta.vector_entry import chunk_gdn2, chunk_kda

pytestmark = pytest.mark.usefixtures("poisoned")


def call(y, *, norm=True, raw=False, lower=None, sigmoid=0.0, v_first=False, cu=None, safe=False, keep=False, **more):
    if "b" in y:
        return chunk_gdn2(
            y["q"], y["k"], y["v"], y["g"], y["b"], y["w"], None, y.get("initial_state"), True, norm, raw,
            None if cu is None else torch.tensor(cu), None, safe, lower, keep, more.pop("states", False), v_first,
            A_log=y.get("A_log"), dt_bias=y.get("dt_bias"), **more,
        )  # fmt: skip
    return chunk_kda(
        y["q"], y["k"], y["v"], y["g"], y["beta"], None, y.get("initial_state"), True, norm, raw, bool(sigmoid),
        sigmoid == 2.0, safe, lower, keep, more.pop("states", False), v_first, None if cu is None else torch.tensor(cu),
        A_log=y.get("A_log"), dt_bias=y.get("dt_bias"), **more,
    )  # fmt: skip


def run(x, monkeypatch=None, change: dict[str, Any] | None = None, scale_do=1.0, **settings):
    """Errors of outputs and of every gradient."""
    if change:
        plan = vector_work.plan
        monkeypatch.setattr(vector_work, "plan", lambda *a, **k: dataclasses.replace(plan(*a, **k), **change))
    y = {n: t.clone().requires_grad_() for n, t in x.items()}
    o, ht = call(y, **settings)
    gen = torch.Generator().manual_seed(1)
    do = (torch.randn(x["v"].shape, generator=gen) * scale_do).to(x["v"].dtype)
    dht = torch.randn(ht.shape, generator=gen) * scale_do
    grads = torch.autograd.grad((o.float() * do.float()).sum() + (ht * dht).sum(), list(y.values()))
    got = {"o": o, "ht": ht, **dict(zip(y, grads, strict=True))}
    known = {n: v for n, v in settings.items() if n not in ("safe", "keep")}
    ref = with_gradients(x, do, dht, **known)
    assert all(got[n].dtype == x[n].dtype for n in x)
    return {n: ratio(got[n], ref[n]) for n in ref}


def check(errors, limit=1e-5):
    wrong = {n: e for n, e in errors.items() if not e < limit}
    assert not wrong, wrong


@pytest.mark.parametrize("safe", [False, True])
def test_ready_gate_ragged_length(safe):
    check(run(make_inputs(T=70), safe=safe))


def test_bounded_gate_in_kernel_with_grouped_values_odd_sizes_and_v_first_states():
    x = make_inputs(B=2, T=64, H=1, HV=2, K=20, V=24, gate="raw", raw_beta=True, sequences=2, v_first=True)
    check(run(x, raw=True, lower=-5.0, sigmoid=2.0, v_first=True))


def test_softplus_gate_with_empty_and_ragged_sequences():
    x = make_inputs(T=100, H=2, gate="raw", raw_beta=True, sequences=4)
    check(run(x, raw=True, sigmoid=1.0, cu=[0, 30, 30, 34, 100]))


def test_gate_without_rate_or_bias():
    check(run(make_inputs(T=40, gate="raw", A=False, bias=False), raw=True, lower=-3.0))


def test_bound_below_minus_five_takes_the_exact_path():
    check(run(make_inputs(T=64, gate="raw", bias=False), raw=True, lower=-40.0))


def test_gates_at_the_bound_over_whole_blocks():
    errors = run(make_inputs(T=64, gate="bound"), safe=True)
    # What is left of the decay's gradient here is the small difference of large terms.
    check({"g": errors.pop("g")}, 1e-4)
    check(errors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_any_decay_is_exact(dtype):
    x = make_inputs(T=70, gate="extreme", g_dtype=torch.float32, dtype=dtype)
    x["g"][:, 5] = -float("inf")
    check(run(x), 1e-5 if dtype == torch.float32 else 2e-3)


def work_of(x, **settings):
    call = vector_work.VectorCall(scale=1.0, exact=True, **{"norm": True, **settings})
    return vector_work.Work(call, *map(x.get, ("q", "k", "v", "g", "beta", "A_log", "dt_bias")), None)


def marks_of(x, **settings):
    """Which chunks of 32 tokens `[heads, chunks]` the first stage finds strong."""
    work = work_of(x, **settings)
    work.prep(train=True)
    chunks = -(-x["q"].shape[1] // 32)
    return work.marks.view(-1, x["v"].shape[2], 2).transpose(0, 1).flatten(1)[:, :chunks].tolist()


def test_chunks_are_told_apart_at_231_bits_in_any_channel():
    x = make_inputs(T=140, H=2, K=32, gate="mixed", dtype=torch.float16)
    assert marks_of(x) == [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0]]
    x["g"] = torch.zeros_like(x["g"])
    assert marks_of(x) == [[0] * 5, [0] * 5]
    x["g"][0, 40, 1, 31] = -160.0  # nat: 230.8 bits
    assert marks_of(x) == [[0] * 5, [0] * 5]
    x["g"][0, 40, 1, 31] = -161.0
    assert marks_of(x) == [[0] * 5, [0, 1, 0, 0, 0]]
    x["g"][0, 100, 0, 0] = -float("inf")
    assert marks_of(x) == [[0, 0, 0, 1, 0], [0, 1, 0, 0, 0]]


def test_gates_of_a_head_with_a_steep_rate_are_strong():
    x = make_inputs(T=64, H=2, K=32, gate="raw mixed", dtype=torch.float16)
    assert marks_of(x, gate=1) == [[1, 1], [0, 0]]


def test_large_elements_without_the_norm_take_the_exact_form():
    x = make_inputs(T=64, H=2, K=32, normed=True, dtype=torch.float16)
    assert marks_of(x, norm=False) == [[0, 0], [0, 0]]
    x["q"][0, 3, 1, 7] = 2000.0
    assert marks_of(x, norm=False) == [[0, 0], [1, 1]]
    check(run(x, norm=False), 5e-3)


@pytest.mark.parametrize("channels", [False, True])
def test_strong_gates_in_some_chunks_and_heads_beside_mild_ones(channels):
    x = make_inputs(T=140, H=2, K=32, gate="mixed", dtype=torch.float16, channels=channels, sequences=1)
    check(run(x), 5e-3)


def test_strong_gates_in_several_blocks_of_channels_with_grouped_values_in_packed_sequences():
    x = make_inputs(T=100, H=1, HV=2, K=72, V=40, gate="mixed", dtype=torch.float16, sequences=3)
    check(run(x, cu=[0, 35, 36, 100]), 5e-3)


def test_strong_gates_made_in_the_kernel_beside_mild_ones():
    x = make_inputs(T=70, H=2, K=72, V=32, gate="raw mixed", dtype=torch.float16, raw_beta=True)
    check(run(x, raw=True, sigmoid=1.0), 5e-3)


def test_gradients_of_any_scale_under_the_bounded_gate():
    check(run(make_inputs(T=64), safe=True, scale_do=1e-9))


@pytest.mark.parametrize("safe", [False, True])
def test_half_precision(safe):
    check(run(make_inputs(T=64, K=32, dtype=torch.float16), safe=safe), 2e-3)


def test_keys_normed_by_the_caller_and_kept_states():
    check(run(make_inputs(T=64, normed=True, sequences=1), norm=False, safe=True, keep=True))


@pytest.mark.parametrize("length", [1, 2, 31, 33])
def test_short_sequences(length):
    check(run(make_inputs(T=length, sequences=1), safe=True))


def test_descriptors(monkeypatch):
    x = make_inputs(T=70, HV=2, K=32, dtype=torch.float16, sequences=1)
    check(run(x, monkeypatch, {"tma": True}, safe=True), 2e-3)
    check(
        run(make_inputs(T=64, K=32, dtype=torch.float16), monkeypatch, {"tma": True, "grad_tma": True}, safe=True), 2e-3
    )


def test_wide_heads_in_several_blocks(monkeypatch):
    change = {"kb": 16, "gkb": 16, "vb": 16, "bv": 16, "bv_bwd": 16}
    check(run(make_inputs(T=40, K=32), monkeypatch, change, safe=True))
    check(run(make_inputs(T=40, K=32), monkeypatch, change))


@pytest.mark.parametrize("T", [256, 200, 70])
def test_time_split(T, monkeypatch):
    x = make_inputs(T=T, sequences=1)
    check(run(x, monkeypatch, {"segments": 3}, safe=True))


def test_time_split_of_one_packed_sequence_through_descriptors(monkeypatch):
    x = make_inputs(T=140, K=32, dtype=torch.float16, sequences=1, v_first=True)
    check(run(x, monkeypatch, {"segments": 2, "tma": True}, safe=True, cu=[0, 140], v_first=True), 2e-3)


@pytest.mark.parametrize("chunk_size", [32, 64])
@pytest.mark.parametrize("cu", [None, [0, 0, 40, 110]])
def test_intermediate_states_are_those_before_each_chunk(chunk_size, cu):
    x = make_inputs(T=110, V=24)
    cut = cu or [0, 110]
    with torch.no_grad():
        _o, _ht, h = call(x, cu=cu, states=True, chunk_size=chunk_size, safe=True)
        want = []
        for a, b in itertools.pairwise(cut):
            for t in range(a, b, chunk_size):
                part = {n: v[:, a:t] for n, v in x.items()}
                want.append(call(part, safe=True)[1] if t > a else torch.zeros(1, 1, 16, 24))
    assert h.dtype == torch.float32
    assert h.shape == (1, len(want), 1, 16, 24)
    assert ratio(h[0], torch.cat(want)) < 1e-5


def test_rows_outside_all_sequences_are_zero_in_graph_mode():
    x = make_inputs(T=70)
    y = {n: t.clone().requires_grad_() for n, t in x.items()}
    o, _ = call(y, cu=[0, 20, 40, 40], use_graph=True, max_num_seqs=3, safe=True)
    grads = torch.autograd.grad(o.square().sum(), list(y.values()))
    assert not o[:, 40:].any()
    assert all(torch.isfinite(g).all() and not g[:, 40:].any() for g in grads)


def test_empty_batch_of_tokens_returns_the_initial_state():
    x = make_inputs(T=0, sequences=1)
    o, ht = call(x)
    assert o.shape == (1, 0, 1, 16)
    assert torch.equal(ht, x["initial_state"])


def test_zeros_and_no_initial_state_agree():
    x = make_inputs(T=40)
    z = {**x, "initial_state": torch.zeros(1, 1, 16, 16)}
    a = {n: t.clone().requires_grad_() for n, t in x.items()}
    b = {n: t.clone().requires_grad_() for n, t in z.items()}
    ga = torch.autograd.grad(call(a, safe=True)[0].sum(), list(a.values()))
    gb = torch.autograd.grad(call(b, safe=True)[0].sum(), list(b.values()))
    assert all(torch.equal(p, r) for p, r in zip(ga, gb, strict=False))
    assert ga[3][:, 0].abs().max() < 1e-6 * ga[3].abs().max()


@pytest.mark.parametrize("safe", [False, True])
def test_erase_and_write_gates_per_channel(safe):
    check(run(make_inputs(T=70, H=1, HV=2, K=20, V=24, channels=True, sequences=1), safe=safe))


def test_erase_gates_with_the_gate_in_kernel_and_packed_sequences():
    x = make_inputs(T=100, H=2, gate="raw", channels=True, sequences=4, v_first=True)
    check(run(x, raw=True, cu=[0, 30, 30, 34, 100], v_first=True))
    check(run(make_inputs(T=64, gate="raw", channels=True), raw=True, lower=-5.0))


def test_erase_gates_with_normed_keys_kept_states_and_blocks_of_channels(monkeypatch):
    check(run(make_inputs(T=64, normed=True, channels=True), norm=False, safe=True, keep=True))
    change = {"kb": 16, "gkb": 16, "vb": 16, "bv": 16, "bv_bwd": 16}
    check(run(make_inputs(T=40, K=32, channels=True), monkeypatch, change))


@pytest.mark.parametrize("safe", [False, True])
def test_erase_gates_in_half_precision_and_through_descriptors(safe, monkeypatch):
    x = make_inputs(T=64, K=32, dtype=torch.float16, channels=True)
    check(run(x, monkeypatch, {"tma": True, "grad_tma": True}, safe=safe), 2e-3)


def test_equal_gates_in_all_channels_are_kimi_delta_attention():
    x = make_inputs(T=70, sequences=1)
    y = {n: t for n, t in x.items() if n != "beta"}
    y["b"], y["w"] = x["beta"][..., None].expand(1, 70, 1, 16), x["beta"][..., None].expand(1, 70, 1, 16)
    for a, b in zip(call(x), call(y), strict=True):
        assert ratio(a, b) < 1e-6


def test_erase_gates_also_return_states_before_chunks():
    x = make_inputs(T=100, channels=True)
    with torch.no_grad():
        _, ht, h = call(x, states=True)
        assert h.shape == (1, 2, 1, 16, 16)
        half = {n: t[:, :64] for n, t in x.items()}
        assert ratio(h[:, 1], call(half)[1]) < 1e-5
        assert ht.shape == (1, 1, 16, 16)


@pytest.mark.parametrize(("T", "some"), [(1, False), (15, False), (16, True)])
def test_few_tokens_take_the_exact_form_of_the_scores(T, some):
    x = make_inputs(T=T, dtype=torch.float16, sequences=1)
    assert work_of(x).some == some
    with torch.no_grad():
        o, ht = call(x, safe=True)
        want, want_ht = call(x, safe=False)
    # From 16 tokens on both take the short form: nothing is strong here.
    assert torch.equal(o, want)
    assert torch.equal(ht, want_ht)


def _unit(x):
    for n in ("q", "k"):
        x[n] = torch.nn.functional.normalize(x[n].float(), dim=-1).half()
    return x


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("channels", [False, True])
def test_half_precision_unit_keys_run_in_half_precision_and_longer_ones_in_fp32(safe, channels):
    x = _unit(make_inputs(T=70, H=1, HV=2, K=32, dtype=torch.float16, sequences=1, channels=channels))
    errors = run(x, norm=False, safe=safe)
    check(errors, 3e-3)
    assert errors["initial_state"] > 1e-5
    x["k"][:, 40] *= 1.5
    errors = run(x, norm=False, safe=safe)
    check(errors, 3e-3)
    assert errors["initial_state"] < 1e-5


def test_long_half_precision_keys_in_packed_sequences_with_the_gate_in_the_kernel():
    cu = [0, 3, 3, 50, 80]
    x = _unit(make_inputs(T=80, K=20, V=24, dtype=torch.float16, gate="raw", sequences=4))
    x["k"] *= 1.3
    check(run(x, norm=False, cu=cu, raw=True), 3e-3)


def test_half_precision_keys_that_are_no_unit_vectors_run_in_fp32():
    """Case N05."""
    x = make_inputs(T=64, K=64, dtype=torch.float16)
    o, ht = call(x, norm=False)
    wide, wide_ht = call({n: t.float() if n in ("q", "k", "v") else t for n, t in x.items()}, norm=False)
    assert o.dtype == torch.float16
    assert torch.equal(o, wide.clamp(-65504, 65504).half())
    assert torch.equal(ht, wide_ht)
