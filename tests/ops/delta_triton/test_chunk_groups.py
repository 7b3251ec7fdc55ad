# SPDX-License-Identifier: MIT
"""First stage and gradients of whole chunks in Gluon: as written, on the CPU, against the token recurrence in float64;
which calls they serve."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import gluon_on_cpu
from delta_reference import make_inputs
from test_scalar import check, run
from triton.compiler.errors import CompilationError

from fla import settings
from fla.ops._common import gluon
from fla.ops._common.policy import CHIPS
from fla.ops._delta import chunk_groups
from fla.ops._delta.policy import scalar_plan

KERNELS = Path(chunk_groups.__file__).parent / "kernels"
NAME = "fla.ops._delta.kernels"
PLAN = {"chunk": 64, "step": 64, "descriptors": True, "grad_k": 64, "grad_v": 64, "prep_k": 64, "chunk_groups": True}

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture
def kernels(monkeypatch):
    found = []
    for name, kernel in (("scalar_groups_prep", "groups_prep"), ("scalar_groups_grad", "groups_grad")):
        module = gluon_on_cpu.load(KERNELS / f"{name}.py", f"{NAME}.{name}")
        monkeypatch.setitem(sys.modules, f"{NAME}.{name}", module)
        found.append(gluon_on_cpu.OnCpu(getattr(module, kernel)))
    monkeypatch.setattr(chunk_groups, "_kernels", lambda: tuple(found))
    monkeypatch.setattr(gluon, "_failed", [])
    monkeypatch.setattr(gluon, "_against", lambda: None)
    return found


CASES = {
    "given": ({"gate": "given"}, {}),
    "none": ({"gate": None}, {}),
    "unnormed": ({"norm": False}, {"norm": False}),
    "in the kernel": ({"T": 128, "seed": 1, "gate": "kernel", "raw_beta": True, "H": 1, "HV": 2}, {"sigmoid": 2.0}),
    "read": ({"read": True}, {"before": True}),
    "read after": ({"read": True, "gate": None}, {}),
    "read, unnormed": ({"read": True, "norm": False}, {"before": True, "norm": False}),
    "before": ({}, {"before": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_whole_chunks(kernels, case):
    settings, options = CASES[case]
    check(run(make_inputs(**{"T": 256, "H": 1, "K": 64, **settings}), change=PLAN, **options))
    # Without the norm the inverse needs more than 16 bits.
    assert [k.runs for k in kernels] == [int(options.get("norm", True)), 1]


@pytest.mark.parametrize("read", [False, True])
def test_gradients_leave_ragged_chunks_to_triton(kernels, read):
    x = make_inputs(T=300, K=64, read=read, initial=True, sequences=6)
    check(run(x, change=PLAN, cu=[0, 5, 5, 69, 197, 261, 300], before=read))
    check(run(make_inputs(B=2, T=150, K=64, read=read), change=PLAN, before=read))
    assert [k.runs for k in kernels] == [2, 2]


def test_kernels_that_do_not_compile_give_way_to_triton(monkeypatch):
    class Failing:
        def fix(self, meta, options):
            raise CompilationError(None, None, "nothing of that name")

    monkeypatch.setattr(chunk_groups, "_kernels", lambda: (Failing(), Failing()))
    monkeypatch.setattr(gluon, "_failed", [])
    monkeypatch.setattr(settings, "_said", set())
    monkeypatch.setattr(gluon, "_against", lambda: None)
    with pytest.warns(RuntimeWarning, match="nothing of that name"):
        check(run(make_inputs(T=70, K=64), change=PLAN))


def test_they_serve_bfloat16_of_one_width_on_hopper():
    def served(chip="sm90", dtype=torch.bfloat16, K=128, V=128):
        return scalar_plan(CHIPS[chip], dtype, K, V, 96, True).chunk_groups

    assert served()
    assert not any(served(chip) for chip in ("sm80", "sm100", "interpreter"))
    assert not any(served(dtype=dtype) for dtype in (torch.float16, torch.float32))
    assert not any(served(K=K, V=V) for K, V in ((64, 64), (256, 256), (128, 64), (128, 256)))
