# SPDX-License-Identifier: MIT
"""State passes in Gluon: as written, on the CPU, against the token recurrence in float64; which calls they serve."""

from __future__ import annotations

import dataclasses
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
from fla.ops._delta import groups
from fla.ops._delta.autograd import delta_rule
from fla.ops._delta.policy import scalar_plan

KERNELS = Path(groups.__file__).parent / "kernels"
NAME = "fla.ops._delta.kernels.scalar_groups"

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture
def kernels(monkeypatch):
    scan = gluon_on_cpu.load(KERNELS / "scalar_groups.py", NAME)
    monkeypatch.setitem(sys.modules, NAME, scan)
    reverse = gluon_on_cpu.load(KERNELS / "scalar_groups_reverse.py", f"{NAME}_reverse")
    found = gluon_on_cpu.OnCpu(scan.groups_scan), gluon_on_cpu.OnCpu(reverse.groups_reverse)
    monkeypatch.setattr(groups, "_kernels", lambda: found)
    monkeypatch.setattr(gluon, "_failed", [])
    monkeypatch.setattr(gluon, "_against", lambda: None)
    yield found
    # A forward pass for each reverse pass; states are computed again here without a read key only.
    assert found[1].runs > 0
    assert found[0].runs in (found[1].runs, 2 * found[1].runs)


def change(count):
    return {"chunk": 64, "step": 64, "groups": count, "descriptors": True}


def test_steps_go_round_the_rings(kernels):
    check(run(make_inputs(T=320, K=16, V=128, initial=True), change=change(2)))


@pytest.mark.parametrize("count", [1, 2])
def test_a_ragged_end_with_groups_of_heads(kernels, count):
    check(run(make_inputs(B=2, T=100, H=1, HV=2, K=16, V=128, gate="kernel"), change=change(count)))


def test_read_keys_have_a_ring_of_their_own(kernels):
    check(run(make_inputs(T=270, K=16, V=128, read=True, initial=True), change=change(2), before=True))


@pytest.mark.parametrize("read", [False, True])
def test_packed_sequences_and_blocks_of_columns(kernels, read):
    x = make_inputs(T=210, K=16, V=128, read=read, initial=True, v_first=True, sequences=5)
    check(run(x, change=change(1), v_first=True, cu=[0, 5, 5, 69, 200, 210], before=read))


@pytest.mark.parametrize("read", [False, True])
def test_what_is_not_finite_stays_in_its_sequence(kernels, read):
    chip = CHIPS["interpreter"]
    plan = dataclasses.replace(scalar_plan(chip, torch.float32, 16, 64, 1, True), **change(1))
    x = make_inputs(T=192, K=16, V=64, read=read)
    found = []
    for poison in (0.0, float("nan")):
        y = {n: t.clone() for n, t in x.items()}
        do = torch.ones_like(x["v"])
        for t in (*(y[n] for n in ("q", "k", "p", "v") if n in y), do):
            t[:, 70:] += poison
        y = {n: t.requires_grad_() for n, t in y.items()}
        o, _ = delta_rule(
            y["q"], y["k"], y["v"], y["g"], y["beta"], scale=None, initial_state=None, output_final_state=False,
            norm=True, cu_seqlens=torch.tensor([0, 70, 192]), chip=chip, plan=plan, segments=1, read=y.get("p"),
            before=read,
        )  # fmt: skip
        found.append([t[:, :70] for t in (o, *torch.autograd.grad(o, list(y.values()), do))])
    for clean, other in zip(*found, strict=True):
        assert torch.equal(clean, other)


class Failing:
    def fix(self, meta, options):
        def run(grid, args, given):
            raise self.error

        return run


@pytest.fixture
def failing(monkeypatch):
    monkeypatch.setattr(groups, "_kernels", lambda: (Failing(), Failing()))
    monkeypatch.setattr(gluon, "_failed", [])
    monkeypatch.setattr(settings, "_said", set())
    monkeypatch.setattr(gluon, "_against", lambda: None)
    return Failing


@pytest.mark.parametrize(
    "error",
    [CompilationError(None, None, "nothing of that name"), RuntimeError("error encountered during parsing")],
    ids=["no such name", "not a program"],
)
def test_a_kernel_that_does_not_compile_gives_way_to_triton(failing, error):
    failing.error = error
    with pytest.warns(RuntimeWarning, match=str(error).strip()):
        check(run(make_inputs(T=100, K=16, V=64), change=change(1)))
    assert str(error) in gluon.why_not()


def test_what_goes_wrong_while_a_kernel_runs_is_raised(failing):
    failing.error = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run(make_inputs(T=100, K=16, V=64), change=change(1))
    assert gluon.why_not() is None


def test_the_setting_turns_them_off(monkeypatch):
    monkeypatch.setattr(gluon, "_failed", [])
    gluon._against.cache_clear()
    with settings.override(FLA_CORE_GLUON=False):
        assert gluon.why_not() == "FLA_CORE_GLUON is off"
    gluon._against.cache_clear()


def plan(chip="sm90", dtype=torch.bfloat16, K=128, V=128, heads=96):
    return scalar_plan(CHIPS[chip], dtype, K, V, heads, True)


def test_pairs_of_groups_share_keys_where_heads_fill_the_chip():
    assert plan().groups == 2
    assert plan(heads=16).groups == 1
    assert plan(V=256, heads=40).groups == 2


@pytest.mark.parametrize("chip", ["sm80", "sm100", "interpreter"])
def test_other_chips_stay_with_triton(chip):
    assert plan(chip).groups == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_stay_with_triton(dtype):
    assert plan(dtype=dtype).groups == 0


@pytest.mark.parametrize(("K", "V"), [(64, 64), (256, 256), (128, 64)])
def test_other_widths_stay_with_triton(K, V):
    assert plan(K=K, V=V).groups == 0
