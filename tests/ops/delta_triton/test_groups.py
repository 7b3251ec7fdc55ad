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
from delta_reference import make_inputs, strain
from test_scalar import check, run
from triton.compiler.errors import CompilationError

from fla import settings
from fla.ops._common import gluon
from fla.ops._common.policy import CHIPS
from fla.ops._delta import groups, scalar
from fla.ops._delta.autograd import delta_rule
from fla.ops._delta.policy import scalar_plan

KERNELS = Path(groups.__file__).parent / "kernels"
NAME = "fla.ops._delta.kernels.scalar_groups"
HALF = torch.float16

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


@pytest.mark.parametrize(
    ("K", "count", "v_first", "read"), [(64, 1, False, True), (256, 2, True, False), (256, 1, False, False)]
)
def test_tiles_of_64_channels_and_states_in_blocks_of_them(kernels, K, count, v_first, read):
    x = make_inputs(T=300, K=K, V=64 * count, read=read, initial=True, v_first=v_first, sequences=3)
    check(run(x, change=change(count), v_first=v_first, cu=[0, 270, 270, 300], before=read))


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


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_ordinary_values_stay_in_float16(kernels, count, read):
    x = make_inputs(B=2, T=100, H=1, HV=2, K=16, V=128, initial=True, dtype=HALF, read=read)
    errors = run(x, change=change(count), before=read)
    check(errors, 3e-3)
    assert errors["ht"] > 1e-5
    assert errors["initial_state"] > 1e-5


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    "far", [{"h0": 1e5}, {"v": 1e4, "beta": 2.0}, {"beta": 2.0, "parallel": True}, {"v": 1e-5, "h0": 1e-5}],
    ids=["states", "values", "keys", "tiny"],
)  # fmt: skip
def test_what_float16_does_not_hold_is_done_again(kernels, far, norm):
    x = make_inputs(T=128, K=16, V=64, initial=True, dtype=HALF, norm=norm, shift=6.0)
    x = strain(x, **far, length=None if norm else 1.0)
    if "h0" in far and "v" not in far:
        x["initial_state"][..., :32] *= 1e-5
    errors = run(x, norm=norm, change=change(1))
    check({n: errors[n] for n in ("ht", "v", "initial_state", "g")}, 5e-3)
    assert errors["ht"] < 1e-4


CASES = {
    "ordinary": {}, "no digits left": {"v": 1e-6, "h0": 1e-6}, "a large state": {"h0": 1e5},
    "large values": {"v": 6e4, "beta": 2.0}, "nothing": {"v": 0.0, "h0": 0.0},
}  # fmt: skip


def verdict(words):
    """What is said; of a call that left the range, only that."""
    return words[:1] if words[0] else words


@pytest.mark.parametrize("cu", [None, [0, 5, 5, 70]])
@pytest.mark.parametrize("name", list(CASES))
def test_the_watch_says_what_triton_says(kernels, name, cu):
    """After the forward pass, and after the passes of the backward."""
    n = 1 if cu is None else len(cu) - 1
    x = make_inputs(T=70, H=1, HV=2, K=16, V=64, initial=True, dtype=HALF, sequences=n)
    x = strain(x, **CASES[name])
    q, k, v, g, beta, h0 = (x[n] for n in ("q", "k", "v", "g", "beta", "initial_state"))
    offsets = None if cu is None else torch.tensor(cu)
    for do in (torch.ones_like(v), 1e-6 * torch.ones_like(v), 1e4 * v.sign()):
        said = []
        for count in (0, 1):
            plan = dataclasses.replace(scalar_plan(CHIPS["interpreter"], HALF, 16, 64, 2, True), **change(count))
            call = scalar.ScalarCall.make(
                k, v, 0.25, True, 0.0, False, offsets, chip=CHIPS["interpreter"], plan=plan, segments=1
            )
            T, A, sc, long = scalar.prepare(call, q, k, v, g, beta, None, None, True)
            scalar.scan(call, q, k, v, T, A, sc, h0, None, True, True, False, None, long)
            words = [long.tolist()]
            long.zero_()
            scalar.scan(call, q, k, v, T, A, sc, h0, None, False, False, True, None, long)
            scalar.reverse(call, q, k, do, T, A, sc, None, None, None, long)
            said.append([verdict(w) for w in (*words, long.tolist())])
        assert said[0] == said[1]


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


def test_float32_stays_with_triton():
    assert plan(dtype=torch.float32).groups == 0
    half = scalar.ScalarCall.make(
        *(torch.empty(1, 64, 96, 128, dtype=HALF, device="meta") for _ in "kv"), 1.0, True, 0.0, False, None,
        chip=CHIPS["sm90"],
    )  # fmt: skip
    assert half.plan.groups == 2
    assert half.other.plan.groups == 0


def test_of_64_channels_two_programs_of_one_group_share_a_multiprocessor():
    assert [plan(K=64, V=V, heads=192).groups for V in (64, 128, 192)] == [1, 1, 1]


def test_passes_that_triton_does_faster_are_left_to_it():
    read = [scalar_plan(CHIPS["sm90"], torch.bfloat16, K, K, 200, True, True) for K in (64, 128, 256)]
    assert [p.groups for p in read] == [1, 2, 0]
    assert [p.groups_again for p in read[:2]] == [False, False]
    assert [plan(K=K, V=K).groups_again for K in (64, 128, 256)] == [False, True, True]
    assert plan(K=64, V=64, heads=32).groups_again


def test_pairs_of_groups_take_wide_states():
    assert plan(K=256, V=256).groups == plan(K=256, V=512).groups == 2
    assert plan(K=256, V=256, heads=16).groups == 1


@pytest.mark.parametrize(("K", "V"), [(32, 64), (192, 192), (100, 128), (128, 64), (128, 96), (64, 96), (256, 64)])
def test_other_widths_stay_with_triton(K, V):
    assert plan(K=K, V=V).groups == 0
