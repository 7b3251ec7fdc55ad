# SPDX-License-Identifier: MIT
"""The forward scan in Gluon: as written, on the CPU, against the token recurrence in float64; which calls it serves."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import gluon_on_cpu
from linear_reference import GATES, make_inputs
from test_scalar_linear import check, run

from fla import settings
from fla.ops._common import gluon
from fla.ops._common.policy import CHIPS
from fla.ops._linear import groups
from fla.ops._linear.autograd import scalar_linear
from fla.ops._linear.policy import scalar_plan

KERNELS = Path(groups.__file__).parent / "kernels"
NAME = "fla.ops._linear.kernels.scalar_groups"
CU = [0, 5, 5, 69, 200, 210]

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture
def kernel(monkeypatch):
    loaded = {}
    for part in ("", "_backward"):
        loaded[part] = gluon_on_cpu.load(KERNELS / f"scalar_groups{part}.py", NAME + part)
        monkeypatch.setitem(sys.modules, NAME + part, loaded[part])
    found = gluon_on_cpu.OnCpu(loaded[""].linear_groups_scan)
    thrice = gluon_on_cpu.OnCpu(loaded["_backward"].linear_groups_thrice)
    found.thrice = thrice
    monkeypatch.setattr(groups, "_scan", lambda: found)
    monkeypatch.setattr(groups, "_thrice", lambda: thrice)
    monkeypatch.setattr(gluon, "_failed", [])
    monkeypatch.setattr(gluon, "_against", lambda: None)
    yield found
    assert found.runs > 0


def change(count, places=2):
    return {"chunk": 64, "groups": count, "places": places, "descriptors": True}


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("count", "places"), [(2, 2), (1, 3)])
def test_steps_go_round_the_ring(kernel, gate, count, places):
    check(run(make_inputs(T=320, K=16, V=128, gate=gate, initial=True), change=change(count, places)))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("count", [1, 2])
def test_a_ragged_end(kernel, gate, count):
    check(run(make_inputs(B=2, T=100, H=2, K=16, V=128, gate=gate), change=change(count)))


@pytest.mark.parametrize("gate", GATES)
def test_packed_sequences_and_blocks_of_columns(kernel, gate):
    x = make_inputs(T=210, K=16, V=256, gate=gate, initial=True, v_first=True, sequences=5)
    check(run(x, change=change(2), v_first=True, cu=CU))


@pytest.mark.parametrize("gate", ["head", None])
@pytest.mark.parametrize("cu", [None, CU])
def test_states_where_stretches_of_the_backward_begin(kernel, gate, cu):
    x = make_inputs(T=210, K=16, V=64, gate=gate, initial=True, sequences=5 if cu else None)
    check(run(x, change={**change(1), "thrice": True}, marks=3, cu=cu))


@pytest.mark.parametrize("gate", ["head", None])
@pytest.mark.parametrize(("cu", "marks", "v_first"), [(None, 3, False), (CU, 2, True), (None, 1, True)])
def test_gradients_by_three_scans(kernel, gate, cu, marks, v_first):
    x = make_inputs(T=210, K=128, V=128, gate=gate, initial=True, v_first=v_first, sequences=5 if cu else None)
    check(run(x, change={**change(2), "thrice": True, "one_scan": True}, marks=marks, cu=cu, v_first=v_first))
    assert kernel.thrice.runs == 1


@pytest.mark.parametrize("low", [-1000.0, -float("inf")])
def test_steps_that_forget_everything(kernel, low):
    x = make_inputs(T=200, K=16, V=64)
    x["g"][:, 5::64] = low
    check(run(x, change=change(1)))


@pytest.mark.parametrize("gate", GATES)
def test_strong_decays(kernel, gate):
    check(run(make_inputs(T=200, K=16, V=64, gate=gate, shift=-20.0), change=change(1)))


@pytest.mark.parametrize("gate", GATES)
def test_what_is_not_finite_stays_in_its_sequence(kernel, gate):
    chip = CHIPS["interpreter"]
    plan = dataclasses.replace(scalar_plan(chip, torch.float32, 16, 64, 1), **change(1))
    x = make_inputs(T=192, K=16, V=64, gate=gate)
    found = []
    for poison in (0.0, float("nan")):
        y = {n: t.clone() for n, t in x.items()}
        for n in ("q", "k", "v"):
            y[n][:, 70:] += poison
        o, ht = scalar_linear(
            **y, cu_seqlens=torch.tensor([0, 70, 192]), output_final_state=True, chip=chip, plan=plan, segments=1
        )
        found.append((o[:, :70], ht[:1]))
    for clean, other in zip(*found, strict=True):
        assert torch.equal(clean, other)


def test_a_kernel_that_does_not_compile_gives_way_to_triton(monkeypatch):
    def failing():
        raise ImportError("nothing of that name")

    monkeypatch.setattr(groups, "_scan", failing)
    monkeypatch.setattr(gluon, "_failed", [])
    monkeypatch.setattr(settings, "_said", set())
    monkeypatch.setattr(gluon, "_against", lambda: None)
    with pytest.warns(RuntimeWarning, match="nothing of that name"):
        check(run(make_inputs(T=100, K=16, V=64), change=change(1)))


def plan(chip="sm90", dtype=torch.bfloat16, K=128, V=128, heads=96):
    return scalar_plan(CHIPS[chip], dtype, K, V, heads)


def test_pairs_of_groups_share_keys_where_heads_fill_the_chip():
    assert plan().groups == 2
    assert plan(heads=16).groups == 1


@pytest.mark.parametrize("chip", ["sm80", "sm100", "interpreter"])
def test_other_chips_stay_with_triton(chip):
    assert plan(chip).groups == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_stay_with_triton(dtype):
    assert plan(dtype=dtype).groups == 0


@pytest.mark.parametrize(("K", "V"), [(64, 64), (256, 256), (128, 64)])
def test_other_widths_stay_with_triton(K, V):
    assert plan(K=K, V=V).groups == 0
