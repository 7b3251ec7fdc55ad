# SPDX-License-Identifier: MIT
"""The scalar-decay kernels in the interpreter, forward and backward, against the token recurrence in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from delta_reference import make_inputs, ratio, with_gradients

from fla.ops._common.policy import CHIPS
from fla.ops._delta.autograd import delta_rule
from fla.ops._delta.policy import scalar_plan

CHIP = CHIPS["interpreter"]

pytestmark = pytest.mark.usefixtures("poisoned")


def run(x, *, norm=True, sigmoid=0.0, v_first=False, cu=None, change=None, segments=1, before=False):
    """Errors of outputs and of every gradient."""
    q, v = x["q"], x["v"]
    plan = dataclasses.replace(scalar_plan(CHIP, q.dtype, q.shape[-1], v.shape[-1], 100, norm), **(change or {}))
    y = {n: t.clone().requires_grad_() for n, t in x.items()}
    o, ht = delta_rule(
        y["q"], y["k"], y["v"], y.get("g"), y["beta"], scale=None, initial_state=y.get("initial_state"),
        output_final_state=True, norm=norm, beta_scale=sigmoid, A_log=y.get("A_log"), dt_bias=y.get("dt_bias"),
        v_first=v_first, cu_seqlens=None if cu is None else torch.tensor(cu), chip=CHIP, plan=plan,
        segments=segments, read=y.get("p"), before=before,
    )  # fmt: skip
    gen = torch.Generator().manual_seed(1)
    do = torch.randn(v.shape, generator=gen).to(v.dtype)
    dht = torch.randn(ht.shape, generator=gen)
    grads = torch.autograd.grad((o.float() * do.float()).sum() + (ht * dht).sum(), list(y.values()))
    got = {"o": o, "ht": ht, **dict(zip(y, grads, strict=True))}
    ref = with_gradients(x, do, dht, norm=norm, sigmoid=sigmoid, v_first=v_first, cu=cu, before=before)
    assert all(got[n].dtype == x[n].dtype for n in x)
    return {n: ratio(got[n], ref[n]) for n in ref}


def check(errors, limit=1e-5):
    wrong = {n: e for n, e in errors.items() if not e < limit}
    assert not wrong, wrong


@pytest.mark.parametrize("gate", [None, "given", "kernel"])
def test_gates(gate):
    check(run(make_inputs(T=70, K=32, gate=gate)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("descriptors", [False, True])
def test_tails_and_dtypes(dtype, descriptors):
    x = make_inputs(B=2, T=70, K=16, V=32, dtype=dtype)
    check(run(x, change={"descriptors": descriptors}), 1e-5 if dtype == torch.float32 else 3e-3)


@pytest.mark.parametrize("v_first", [False, True])
def test_grouped_heads_states_and_write_gate(v_first):
    x = make_inputs(T=40, H=2, HV=4, K=16, gate="kernel", initial=True, v_first=v_first, raw_beta=True)
    check(run(x, sigmoid=2.0, v_first=v_first))


@pytest.mark.parametrize("descriptors", [False, True])
def test_varlen_with_empty_sequences(descriptors):
    cu = [0, 3, 3, 67, 131, 140, 140]
    x = make_inputs(T=140, K=16, dtype=torch.float16, initial=True, sequences=len(cu) - 1)
    check(run(x, cu=cu, change={"descriptors": descriptors}), 3e-3)


def test_a_sequence_does_not_see_its_neighbours():
    """A descriptor tile crosses the end of a sequence; NaN on the other side must not come through."""
    cu = [0, 70, 140]
    x = make_inputs(T=140, K=16, dtype=torch.float16)
    for n in ("q", "k", "v"):
        x[n][:, 70:] = float("nan")
    plan = dataclasses.replace(scalar_plan(CHIP, torch.float16, 16, 16, 100, True), descriptors=True)
    y = {n: t.clone().requires_grad_() for n, t in x.items()}
    o, _ = delta_rule(
        y["q"], y["k"], y["v"], y["g"], y["beta"], scale=None, initial_state=None, output_final_state=False, norm=True,
        cu_seqlens=torch.tensor(cu), chip=CHIP, plan=plan,
    )  # fmt: skip
    do = torch.ones_like(o)
    grads = torch.autograd.grad(o, list(y.values()), do)
    assert all(t[:, :70].isfinite().all() for t in (o, *grads))


@pytest.mark.parametrize("descriptors", [False, True])
@pytest.mark.parametrize("cu", [None, [0, 3, 3, 230, 300]])
def test_stretches_of_time_side_by_side(cu, descriptors):
    n = 1 if cu is None else len(cu) - 1
    x = make_inputs(T=300, K=16, V=32, dtype=torch.float16, initial=True, sequences=n)
    change = {"descriptors": descriptors, "block_v": 16}
    check(run(x, cu=cu, change=change, segments=4), 3e-3)


STEPS = {"step": 16, "chunk": 32}


@pytest.mark.parametrize("descriptors", [False, True])
@pytest.mark.parametrize("cu", [None, [0, 3, 3, 60, 85]])
def test_scans_in_steps_of_half_a_chunk(cu, descriptors):
    sequences = None if cu is None else 4
    x = make_inputs(T=85, H=1, HV=2, K=32, V=32, initial=True, sequences=sequences)
    check(run(x, cu=cu, change={**STEPS, "descriptors": descriptors}))


def test_half_chunks_of_stretches_of_time_and_of_gates_that_forget_everything():
    x = make_inputs(T=130, K=16, V=16)
    x["g"][:, ::5] = -1000.0
    check(run(x, change=STEPS, segments=2), 5e-5)


def test_half_chunks_with_a_read_key_of_its_own():
    check(run(make_inputs(T=85, K=16, V=16, read=True, initial=True), change=STEPS, before=True))


@pytest.mark.parametrize("norm", [True, False])
def test_head_dims_in_blocks(norm):
    blocks = {"prep_k": 16, "grad_k": 16, "grad_v": 16, "block_v": 16}
    check(run(make_inputs(T=33, H=1, HV=2, K=28, V=20, norm=norm, gate="kernel"), norm=norm, change=blocks))


def test_head_dims_in_blocks_through_descriptors():
    blocks = {"prep_k": 16, "grad_k": 16, "grad_v": 16, "block_v": 16, "descriptors": True, "chunk": 32}
    check(run(make_inputs(T=70, K=32, V=32), change=blocks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_beta_of_exactly_zero(dtype):
    x = make_inputs(T=70, K=16, dtype=dtype)
    x["beta"][:, ::4] = 0
    check(run(x), 1e-5 if dtype == torch.float32 else 3e-3)


def test_absent_gate_equals_zero_gate():
    """Case N08."""
    x = make_inputs(T=40, K=16, gate=None)
    check(run(x))
    check(run(x | {"g": torch.zeros_like(x["beta"])}))


@pytest.mark.parametrize("value", [-1000.0, float("-inf")])
def test_gates_that_forget_everything(value):
    x = make_inputs(T=40, K=16)
    x["g"][:, ::5] = value
    y = {n: t.clone().requires_grad_() for n, t in x.items()}
    o, _ = delta_rule(
        y["q"], y["k"], y["v"], y["g"], y["beta"], scale=None, initial_state=None, output_final_state=False, norm=True,
        chip=CHIP,
    )  # fmt: skip
    grads = torch.autograd.grad(o.sum(), list(y.values()))
    assert all(t.isfinite().all() for t in (o, *grads))
    if value > float("-inf"):
        check(run(x), 5e-5)


def test_nearly_identical_keys():
    x = make_inputs(T=64, K=16, dtype=torch.float16, shift=6.0)
    x["k"] = (x["k"] * 0.02 + x["k"][:, :1]).half()
    check(run(x), 5e-3)


@pytest.mark.parametrize("T", [1, 2, 17])
def test_short_sequences(T):
    """First-token dg without an initial state is zero (case N24)."""
    check(run(make_inputs(T=T, K=16)), 1e-4)


def test_long_keys_give_what_fp32_gives():
    """Case N05: the inverse explodes; fp32 holds it."""
    x = make_inputs(T=32, K=64)
    x["k"] = x["k"] * 0.3
    errors = run(x, norm=False)
    assert all(e < 1e-3 for e in errors.values()), errors


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("norm", [True, False])
def test_a_read_key_of_its_own(before, norm):
    """Comba reads with another key, before the decay; preconditioned rules with another key, after it."""
    x = make_inputs(B=2, T=70, H=1, HV=2, K=16, V=24, read=True, norm=norm, initial=True)
    check(run(x, norm=norm, before=before))


def test_reading_before_the_decay_with_the_write_key():
    check(run(make_inputs(T=70, K=16), before=True))


def test_read_keys_in_blocks_and_through_descriptors():
    blocks = {"prep_k": 16, "grad_k": 16, "grad_v": 16, "block_v": 16}
    check(run(make_inputs(T=33, HV=2, K=28, V=20, read=True), before=True, change=blocks))
    x = make_inputs(T=140, K=16, dtype=torch.float16, initial=True, sequences=3, read=True)
    check(run(x, cu=[0, 67, 67, 140], before=True, change={"descriptors": True}), 3e-3)


def test_read_keys_in_stretches_of_time():
    x = make_inputs(T=300, K=16, V=32, dtype=torch.float16, initial=True, read=True)
    check(run(x, before=True, change={"block_v": 16}, segments=4), 3e-3)


def test_strong_decay_with_a_read_before_it():
    x = make_inputs(T=70, K=16, read=True)
    x["g"][:, ::5] = -1000.0
    check(run(x, before=True), 5e-5)


def test_empty_inputs_return_the_initial_state():
    x = make_inputs(T=0, K=16, initial=True)
    o, ht = delta_rule(
        x["q"], x["k"], x["v"], x["g"], x["beta"], scale=None, initial_state=x["initial_state"],
        output_final_state=True,
        norm=True, chip=CHIP,
    )  # fmt: skip
    assert o.shape == x["v"].shape
    torch.testing.assert_close(ht, x["initial_state"])


def test_views_that_begin_off_a_16_byte_boundary():
    x = make_inputs(T=20, K=16, dtype=torch.float16)
    for n in ("q", "k", "v"):
        shifted = torch.zeros(x[n].numel() + 1, dtype=torch.float16)[1:].view(x[n].shape)
        x[n] = shifted.copy_(x[n])
        assert x[n].is_contiguous()
    o, _ = delta_rule(
        x["q"], x["k"], x["v"], x["g"], x["beta"], scale=None, initial_state=None, output_final_state=False, norm=True,
        chip=CHIP,
    )  # fmt: skip
    assert ratio(o, with_gradients(x, torch.ones_like(o), None)["o"]) < 3e-3


@pytest.mark.parametrize("read", [False, True])
def test_half_precision_unit_keys_run_in_half_precision_and_longer_ones_in_fp32(read):
    x = make_inputs(T=70, H=1, HV=2, K=16, dtype=torch.float16, norm=False, initial=True, read=read)
    errors = run(x, norm=False, before=read)
    check(errors, 3e-3)
    assert errors["initial_state"] > 1e-5
    x["k"][:, 40] *= 1.5
    errors = run(x, norm=False, before=read)
    check(errors, 3e-3)
    assert errors["initial_state"] < 1e-5
    assert errors["beta"] < 1e-5


def test_long_half_precision_keys_in_packed_sequences_and_blocks_of_head_dims():
    cu = [0, 3, 3, 50, 80]
    x = make_inputs(T=80, K=32, dtype=torch.float16, norm=False, initial=True, sequences=4, gate="kernel")
    x["k"] *= 1.5
    check(run(x, norm=False, cu=cu, change={"grad_k": 16, "grad_v": 16}), 1e-3)


def test_erasing_more_than_there_is_counts_as_long_keys():
    x = make_inputs(T=40, K=16, dtype=torch.float16, norm=False, initial=True)
    x["beta"][:, 3] = 3.0
    assert run(x, norm=False)["initial_state"] < 1e-5


def test_n05_half_precision_keys_that_are_no_unit_vectors_run_in_fp32():
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 64, 1, 64, generator=gen).half() for _ in range(3))
    beta = torch.randn(1, 64, 1, generator=gen).sigmoid()
    call = lambda q, k, v: delta_rule(
        q, k, v, None, beta, scale=None, initial_state=None, output_final_state=True, norm=False
    )
    o, S = call(q, k, v)
    wide, wide_S = call(q.float(), k.float(), v.float())
    assert wide.abs().max() > 65504, "the case is meant to overflow float16"
    assert torch.equal(o, wide.clamp(-65504, 65504).half())
    assert torch.equal(S, wide_S)
