# SPDX-License-Identifier: MIT
"""KDA's state passes in Gluon: as written, on the CPU, against the token recurrence in float64; which calls they
serve."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import gluon_on_cpu
from delta_reference import strain
from test_groups import HALF, verdict
from test_vector import call, check, make_inputs, run

from fla.ops._common import gluon
from fla.ops._delta import vector_groups, vector_work

KERNELS = Path(vector_groups.__file__).parent / "kernels"
NAME = "fla.ops._delta.kernels"

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture
def kernels(monkeypatch):
    for name in ("scalar_groups", "vector_groups", "vector_groups_reverse"):
        module = gluon_on_cpu.load(KERNELS / f"{name}.py", f"{NAME}.{name}")
        monkeypatch.setitem(sys.modules, f"{NAME}.{name}", module)
    found = (
        gluon_on_cpu.OnCpu(sys.modules[f"{NAME}.vector_groups"].vector_groups),
        gluon_on_cpu.OnCpu(sys.modules[f"{NAME}.vector_groups_reverse"].vector_groups_reverse),
    )
    vector_work._setup.cache_clear()
    monkeypatch.setattr(vector_groups, "_kernels", lambda: found)
    monkeypatch.setattr(gluon, "_failed", [])
    monkeypatch.setattr(gluon, "_against", lambda: None)
    yield found
    vector_work._setup.cache_clear()
    assert found[0].runs > 0
    assert found[1].runs in (0, found[0].runs, found[0].runs // 2)


@pytest.mark.parametrize("count", [1, 2])
def test_steps_go_round_the_ring(kernels, monkeypatch, count):
    x = make_inputs(T=192, H=1, K=16, V=128, sequences=1)
    check(run(x, monkeypatch, {"groups": count}, safe=True))
    # Passes that write states are Triton's where pairs of groups would do them.
    assert (kernels[1].runs > 0) is (count == 1)


@pytest.mark.parametrize("tokens", [70, 100])
def test_a_ragged_end_with_groups_of_heads(kernels, monkeypatch, tokens):
    x = make_inputs(B=2, T=tokens, H=1, HV=2, K=16, V=64, gate="raw", raw_beta=True, sequences=2, v_first=True)
    check(run(x, monkeypatch, {"groups": 1}, raw=True, lower=-5.0, sigmoid=2.0, v_first=True))
    assert kernels[1].runs > 0


@pytest.mark.parametrize("keep", [False, True])
def test_packed_sequences_and_blocks_of_columns(kernels, monkeypatch, keep):
    x = make_inputs(T=210, H=2, K=16, V=64, gate="mixed", sequences=5)
    check(run(x, monkeypatch, {"groups": 1}, cu=[0, 5, 5, 69, 200, 210], keep=keep))
    assert kernels[1].runs > 0


@pytest.mark.parametrize("cu", [None, [0, 70, 140]])
def test_what_is_not_finite_stays_in_its_sequence(kernels, monkeypatch, cu):
    plan = vector_work.plan
    monkeypatch.setattr(vector_work, "plan", lambda *a, **k: dataclasses.replace(plan(*a, **k), groups=1))
    x = make_inputs(B=1 if cu else 2, T=140 if cu else 70, H=1, K=16, V=64)
    found = []
    for poison in (0.0, float("nan")):
        y = {n: t.clone() for n, t in x.items()}
        do = torch.ones_like(x["v"])
        for t in (y["q"], y["k"], y["v"], do):
            t.view(140, -1)[70:] += poison
        y = {n: t.requires_grad_() for n, t in y.items()}
        o, _ = call(y, safe=True, cu=cu)
        grads = torch.autograd.grad(o, list(y.values()), do)
        found.append([t.reshape(140, -1)[:70] for t in (o, *grads)])
    for clean, other in zip(*found, strict=True):
        assert torch.equal(clean, other)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("cu", [None, [0, 5, 5, 70, 100]])
def test_ordinary_values_stay_in_float16(kernels, monkeypatch, count, cu):
    x = make_inputs(T=100, H=2, K=16, V=128, sequences=1 if cu is None else 4, dtype=HALF)
    errors = run(x, monkeypatch, {"groups": count}, safe=True, cu=cu)
    check(errors, 3e-3)
    assert errors["ht"] > 1e-5
    assert errors["initial_state"] > 1e-5


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    "far", [{"h0": 1e5}, {"v": 1e4, "beta": 2.0}, {"beta": 2.0, "parallel": True}, {"v": 1e-5, "h0": 1e-5}],
    ids=["states", "values", "keys", "tiny"],
)  # fmt: skip
def test_what_float16_does_not_hold_is_done_again(kernels, monkeypatch, far, norm):
    x = make_inputs(T=100, K=16, V=64, gate="weak", sequences=1, dtype=HALF, g_dtype=torch.float32)
    x = strain(x, **far, length=None if norm else 1.0)
    if "h0" in far and "v" not in far:
        x["initial_state"][..., :32] *= 1e-5
    errors = run(x, monkeypatch, {"groups": 1}, norm=norm, safe=True)
    check({n: errors[n] for n in ("ht", "v", "initial_state", "g")}, 5e-3)
    assert errors["ht"] < 1e-4


@pytest.mark.parametrize(
    "far", [{}, {"v": 1e-6, "h0": 1e-6}, {"h0": 1e5}, {"v": 6e4, "beta": 2.0}, {"v": 0.0, "h0": 0.0}]
)
def test_the_watch_says_what_triton_says(kernels, monkeypatch, far):
    """After the forward pass, and after the passes of the backward."""
    x = strain(make_inputs(T=70, H=2, K=16, V=64, sequences=1, dtype=HALF), **far)
    h0, plan = x["initial_state"], vector_work.plan
    for do in (torch.ones_like(x["v"]), 1e-6 * torch.ones_like(x["v"]), 1e4 * x["v"].sign()):
        said = []
        for count in (0, 1):
            changed = lambda *a, groups=count, **k: dataclasses.replace(plan(*a, **k), groups=groups)
            monkeypatch.setattr(vector_work, "plan", changed)
            vector_work._setup.cache_clear()
            call = vector_work.VectorCall(scale=0.25, norm=True, exact=False, part=1)
            work = vector_work.Work(call, *(x[n] for n in ("q", "k", "v", "g", "beta")), None, None, None)
            work.prep(train=True)
            work.scan(h0, o=torch.empty_like(x["v"]), ht=work.final_state())
            words = [work.long.tolist()]
            work.long.zero_()
            work.states(h0)
            work.scan_bwd(do, None, None)
            said.append([verdict(w) for w in (*words, work.long.tolist())])
        assert said[0] == said[1]
