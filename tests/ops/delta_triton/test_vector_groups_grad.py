# SPDX-License-Identifier: MIT
"""KDA's gradients in Gluon: as written, on the CPU, against the token recurrence in float64."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch

pytest.importorskip("triton")

import gluon_on_cpu
from test_vector import call, check, make_inputs, run
from test_vector_groups import KERNELS, NAME

from fla.ops._common import gluon
from fla.ops._delta import vector_groups, vector_work

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture
def kernel(monkeypatch):
    for name in ("vector_groups", "vector_groups_grad"):
        module = gluon_on_cpu.load(KERNELS / f"{name}.py", f"{NAME}.{name}")
        monkeypatch.setitem(sys.modules, f"{NAME}.{name}", module)
    found = gluon_on_cpu.OnCpu(module.vector_groups_grad)
    chip_of = vector_work.chip_of
    vector_work._setup.cache_clear()
    monkeypatch.setattr(vector_groups, "_kernels", lambda: (None, None, found))
    monkeypatch.setattr(vector_groups, "serve", lambda work, saves: False)
    # Programs with several chunks each.
    monkeypatch.setattr(vector_work, "chip_of", lambda device: dataclasses.replace(chip_of(device), sms=2))
    monkeypatch.setattr(gluon, "_failed", [])
    monkeypatch.setattr(gluon, "_against", lambda: None)
    yield found
    vector_work._setup.cache_clear()
    assert found.runs > 0


def sizes(**more):
    return {"K": 128, "V": 128, "H": 1, **more}


def test_ready_gates_and_strengths_of_zero(kernel, monkeypatch):
    x = make_inputs(**sizes(T=192, sequences=1))
    x["beta"][:, 5:40:3] = 0.0
    check(run(x, monkeypatch, {"groups": 1}, safe=True))


def test_a_ragged_end_and_raw_strengths(kernel, monkeypatch):
    x = make_inputs(**sizes(B=2, T=100, raw_beta=True, sequences=2, v_first=True))
    check(run(x, monkeypatch, {"groups": 1}, safe=True, sigmoid=2.0, v_first=True))


def test_packed_sequences_without_norms(kernel, monkeypatch):
    x = make_inputs(**sizes(T=210, H=2, normed=True, sequences=5))
    check(run(x, monkeypatch, {"groups": 1}, safe=True, norm=False, cu=[0, 5, 5, 69, 200, 210]))


def test_chunks_of_strong_gates_are_done_again(kernel, monkeypatch):
    x = make_inputs(**sizes(T=128, H=2, gate="mixed", sequences=2))
    setup = vector_work._setup

    def both(call, *a):
        # In float32 all chunks would be done the exact way, and with as many channels a program.
        s = setup(dataclasses.replace(call, exact=False), *a)
        return dataclasses.replace(s, some=True, parts=4, tree=dataclasses.replace(setup(call, *a).plan, gkb=32))

    both.cache_clear = setup.cache_clear
    monkeypatch.setattr(vector_work, "_setup", both)
    check(run(x, monkeypatch, {"groups": 1}, cu=[0, 70, 128]))


def test_what_is_not_finite_stays_in_its_sequence(kernel, monkeypatch):
    plan = vector_work.plan
    monkeypatch.setattr(vector_work, "plan", lambda *a, **k: dataclasses.replace(plan(*a, **k), groups=1))
    x = make_inputs(**sizes(T=140))
    found = []
    for poison in (0.0, float("nan")):
        y = {n: t.clone() for n, t in x.items()}
        do = torch.ones_like(x["v"])
        for t in (y["q"], y["k"], y["v"], y["g"], do):
            t[:, 70:] += poison
        y = {n: t.requires_grad_() for n, t in y.items()}
        o, _ = call(y, safe=True, cu=[0, 70, 140])
        found.append([t[:, :70] for t in torch.autograd.grad(o, list(y.values()), do)])
    for clean, other in zip(*found, strict=True):
        assert torch.equal(clean, other)
