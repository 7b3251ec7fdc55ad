# SPDX-License-Identifier: MIT
"""The pytest plugin as users meet it: options, fixtures, classes, the tally."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import importlib_metadata  # noqa: F401  replaces a finder at its first import, which must not happen inside pytester
import pytest
import torch

from fla.backends import BackendRegistry, BaseBackend, Capability, register, use_backend
from fla.ops.lightning_attn import chunk_lightning_attn
from fla.testing import SPECS, BackendConformance, targets

pytest_plugins = ["pytester"]
OPERATION = "lightning_attn"
core = chunk_lightning_attn.op.fn
targets("torch")  # imports every op; what is first imported inside pytester is forgotten after each run
PLUGIN = ("-p", "no:cacheprovider", "-p", "fla.testing.plugin")


class Mine(BaseBackend):
    backend_type = "mine"

    def chunk_lightning_attn(self, **x):
        return core(**x)


@pytest.fixture
def added() -> Iterator[object]:
    """Registers backends for the length of a test."""
    names = []

    def add(backend: type[BaseBackend], operation: str = OPERATION) -> None:
        names.append((operation, backend.backend_type))
        register(operation, backend())

    yield add
    for operation, name in names:
        BackendRegistry(operation).unregister(name)


def run(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    return pytester.runpytest_inprocess(*PLUGIN, "--pyargs", "fla.testing.conformance", *options)


@pytest.fixture(autouse=True)
def _no_other_plugins(monkeypatch):
    """Some take seconds to load, anew in each run inside pytester."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def test_loading_the_plugin_imports_nothing_heavy_and_is_fast():
    code = """
import pytest, sys, time
began = time.process_time()
import fla.testing.plugin
print(time.process_time() - began)
print(sorted({"torch", "triton", "transformers", "fla.backends", "fla.ops", "fla.testing.cases"} & set(sys.modules)))
"""
    runs = [subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True) for _ in range(3)]
    seconds, loaded = zip(*(done.stdout.splitlines() for done in runs), strict=True)
    assert set(loaded) == {"[]"}
    assert min(map(float, seconds)) < 0.02


def test_a_right_backend_passes_and_what_ran_is_counted(pytester, added):
    added(Mine)
    report = pytester.path / "report.json"
    result = run(pytester, "--fla-backend", "mine", "-k", "length or declared", "--fla-report", str(report))
    assert result.ret == 0
    result.stdout.fnmatch_lines(["mine: 16 cases ran in the backend (16 calls), 0 refused as declared, 0 failed, *"])
    found = json.loads(report.read_text())
    assert found["backends"]["mine"]["functions"] == {
        "lightning_attn.chunk_lightning_attn": {"ran": 16, "refused": 0, "failed": 0, "skipped": 0, "calls": 16}
    }
    assert {c["case"] for c in found["cases"]} >= {"length-T0", "length-T65"}
    assert found["versions"]["torch"] == torch.__version__


def test_refusals_are_counted_apart_and_their_reasons_shown(pytester, added):
    class Small(Mine):
        capability = Capability(dtypes=("float32",), varlen=False, backward=False)

    added(Small)
    result = run(pytester, "--fla-backend", "mine", "-k", "forward or packed-two")
    result.assert_outcomes(passed=10)
    result.stdout.fnmatch_lines(
        [
            "mine: 2 cases ran in the backend (2 calls), 8 refused as declared, 0 failed, 0 skipped",
            "  refused 2x: packed sequences (cu_seqlens) are not supported",
        ]
    )


def test_a_wrong_backend_fails_and_the_case_is_named(pytester, added):
    class Wrong(Mine):
        def chunk_lightning_attn(self, **x):
            o, state = core(**x)
            return (o * 1.001 if x["cu_seqlens"] is not None else o), state

    added(Wrong)
    result = run(pytester, "--fla-backend", "mine", "-k", "length or packed-two")
    result.assert_outcomes(passed=16, failed=2)
    result.stdout.fnmatch_lines(["*output: max abs difference*", "FAILED *mine-chunk_lightning_attn-packed-two? - *"])


def test_a_backend_that_is_not_usable_here_is_skipped_or_with_require_fails(pytester, added):
    class Absent(Mine):
        package_name = "no_such_kernels"

    added(Absent)
    result = run(pytester, "--fla-backend", "mine", "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*skipped 1x: module no_such_kernels is not installed"])
    run(pytester, "--fla-backend", "mine", "--fla-require").assert_outcomes(failed=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_backend_for_hardware_that_is_not_here_is_skipped_with_the_reason(pytester, added):
    class Hopper(Mine):
        capability = Capability(device_types=("cuda",), compute_capability=(9, 0))

    added(Hopper)
    result = run(pytester, "--fla-backend", "mine")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*skipped 1x: this machine has no CUDA device"])


def test_a_probe_that_refuses_is_why_a_backend_is_skipped(pytester, added):
    class Probed(Mine):
        def probe(self):
            return False, "the kernels fail on this driver"

    added(Probed)
    result = run(pytester, "--fla-backend", "mine", "-W", "ignore")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*skipped 1x: its probe says: the kernels fail on this driver"])


def test_a_backend_that_takes_no_call_fails_the_run(pytester, added):
    class Never(Mine):
        def chunk_lightning_attn_verifier(self, **x):
            return False, "K must be 96"

    added(Never)
    result = run(pytester, "--fla-backend", "mine")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*no form of the op is accepted:*", "*K must be 96*"])


def test_a_name_that_is_not_registered_fails_and_names_those_that_are(pytester, added):
    added(Mine)
    result = run(pytester, "--fla-backend", "mein")
    result.assert_outcomes(failed=1)
    # The adapter that core ships is registered where another test of this process has imported the convolutions.
    result.stdout.re_match_lines([r"no backend 'mein' is registered \(registered: (causal_conv1d, )?mine[;,)].*"])


def test_no_backend_named_and_no_function_left_fail(pytester, added):
    added(Mine)
    run(pytester).assert_outcomes(failed=1)
    result = run(pytester, "--fla-backend", "mine", "--fla-op", "kda")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["mine takes over no function that the kit tests among ?'kda'?"])


def test_a_function_without_a_row_is_skipped_by_name(pytester, added):
    class Gate(BaseBackend):
        backend_type = "gate"

        def fused_kda_gate(self, g, **x):
            return g

        def fused_recurrent_kda(self, **x):
            raise AssertionError("not called")

    import fla.ops.kda.gate  # noqa: F401  makes the function known

    added(Gate, "kda")
    result = run(pytester, "--fla-backend", "gate", "-k", "no_row", "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*the kit has no row for kda.fused_kda_gate*"])


def test_arguments_that_a_backend_always_needs_are_given(pytester, added):
    class Chunky(Mine):
        testing_arguments: ClassVar = {"chunk_lightning_attn": {"chunk_size": 32}}

        def chunk_lightning_attn_verifier(self, chunk_size):
            return chunk_size == 32, f"chunk_size must be 32, got {chunk_size}"

    added(Chunky)
    run(pytester, "--fla-backend", "mine", "-k", "length-T65").assert_outcomes(passed=1)


def test_stated_accuracy_is_used_shown_and_bounded(pytester, added):
    class Rough(Mine):
        testing_tolerances: ClassVar = {"float32": (2e-5, 2e-5)}

        def chunk_lightning_attn(self, **x):
            o, state = core(**x)
            return o * (1 + 1.5e-5), state

    added(Rough)
    result = run(pytester, "--fla-backend", "mine", "-k", "length-T65")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*states its own accuracy for float32: results within 2e-05, gradients 2e-05"])
    Rough.testing_tolerances = {"float32": (1e-4, 1e-5)}
    result = run(pytester, "--fla-backend", "mine", "-k", "length-T65")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*the kit allows (2e-05, 2e-05) at most*"])


def test_triton_without_a_driver_is_skipped(pytester, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    options = ("--fla-backend", "triton", "--fla-device", "cpu", "--fla-op", "chunk_gated_delta_rule")
    result = run(pytester, *options)
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*skipped 1x: no Triton driver for cpu"])


def test_a_class_needs_no_options(pytester, added):
    added(Mine)
    pytester.makepyfile(
        """
        from fla.testing import BackendConformance

        class TestMine(BackendConformance):
            backend_type = "mine"
            device = "cpu"

        class TestOther(BackendConformance):
            backend_type = "absent"
        """
    )
    result = pytester.runpytest_inprocess(*PLUGIN, "-k", "T65 or registered")
    result.assert_outcomes(passed=4, failed=1)
    result.stdout.fnmatch_lines(["*TestOther::test_case?absent-registered?*"])


def test_a_package_adds_a_row_for_an_op_of_its_own(pytester, monkeypatch):
    """The example of docs/backends/testing.md."""
    page = (Path(__file__).parents[2] / "docs" / "backends" / "testing.md").read_text(encoding="utf-8")
    (pytester.path / "own_op.py").write_text(re.search(r"no-run: rows.*?\n(.*?)^```", page, re.S | re.M)[1])
    monkeypatch.syspath_prepend(pytester.path)
    pytester.makepyfile(
        """
        import own_op
        from fla.backends import BaseBackend, register
        from fla.testing import BackendConformance

        class Own(BaseBackend):
            backend_type = "own"
            def running_sum(self, q, weight=1.0):
                return (q * weight).cumsum(1)

        register("running_sum", Own())

        class TestOwn(BackendConformance):
            backend_type = "own"
            device = "cpu"
        """
    )
    result = pytester.runpytest_inprocess(*PLUGIN)
    SPECS.pop(("running_sum", "running_sum"))
    assert result.ret == 0
    result.stdout.fnmatch_lines(["own: 84 cases ran in the backend *, 0 refused as declared, 0 failed, 0 skipped"])


# Fixtures


def call() -> None:
    x = torch.randn(1, 3, 2, 8)
    chunk_lightning_attn(x, x, x, 1, 4)


def test_assert_ran_passes_where_the_backend_ran(assert_ran, added):
    added(Mine)
    call()
    call()
    assert_ran("mine")
    assert_ran("mine", "chunk_lightning_attn", times=2)
    with pytest.raises(AssertionError, match="mine served 2 calls, 3 expected"):
        assert_ran("mine", times=3)


def test_assert_ran_fails_where_core_served_and_says_why(assert_ran, assert_core_ran, added):
    class Picky(Mine):
        def chunk_lightning_attn_verifier(self, q):
            return False, "too short"

    added(Picky)
    call()
    with pytest.raises(AssertionError, match=r"(?s)chunk_lightning_attn -> torch, 1 calls.*too short"):
        assert_ran("mine")
    assert_core_ran()


def test_assert_ran_fails_where_a_wrapper_goes_round_dispatch(assert_ran, added):
    """A test that calls the kernels by themselves shows nothing about the backend."""
    added(Mine)
    x = torch.randn(1, 3, 2, 8)
    Mine().chunk_lightning_attn(q=x, k=x, v=x, layer_idx=1, num_layers=4)
    with pytest.raises(AssertionError, match="no dispatched op was called"):
        assert_ran("mine")


def test_assert_core_ran_fails_where_a_backend_or_nothing_ran(assert_core_ran, added):
    with pytest.raises(AssertionError, match="no dispatched op was called"):
        assert_core_ran()
    with use_backend("torch"):
        call()
    assert_core_ran()
    added(Mine)
    call()
    with pytest.raises(AssertionError, match="chunk_lightning_attn -> mine"):
        assert_core_ran()


# The kit on core itself


class TestTorch(BackendConformance):
    """A function with every kind of argument that the mutants, which are of ``chunk_kda``, do not have."""

    backend_type = "torch"
    device = "cpu"
    ops = ("fused_recurrent_gla", "chunk_linear_attn")


@pytest.mark.gpu
class TestTriton(BackendConformance):
    backend_type = "triton"
