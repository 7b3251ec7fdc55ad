# SPDX-License-Identifier: MIT
"""On a Hopper card with tilelang and nvcc, under a strict pin: fla's conformance kit, `benchmarks/check.py`, views that
begin anywhere, and what happens where nothing can be built."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fla_backend_tilelang import scalar, vector
from fla_backend_tilelang.plugin import KDA, TileLang

from fla.backends import BackendUnavailable, devices, explain, last_decision, switches, use_backend
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.kda import chunk_kda

CHECK = Path(__file__).parents[1] / "benchmarks" / "check.py"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not KDA.is_available(), reason="no tilelang or nvcc"),
]


@pytest.fixture(params=[chunk_gated_delta_rule, chunk_kda], ids=lambda op: op.__name__)
def op(request):
    return request.param


@pytest.fixture
def x(op, gdn, kda, backends):
    """Arguments of a call that the programs take, on the card."""
    torch.manual_seed(0)
    made = {chunk_gated_delta_rule: gdn, chunk_kda: kda}[op](T=96)
    found = {n: -torch.rand_like(t, device="cuda") if torch.is_tensor(t) else t for n, t in made.items()}
    return found | {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "output_final_state": True}


def core_serves(op, x, reason):
    """The backend refuses even when it is asked for, says why, and core runs."""
    with torch.no_grad(), use_backend("tilelang"):
        assert re.search(reason, str(explain(op, **x).verdict("tilelang")))
        o, _ = op(**x)
    assert last_decision().backend == "triton"
    assert o.isfinite().all()
    with torch.no_grad(), use_backend("tilelang", strict=True), pytest.raises(BackendUnavailable, match=reason):
        op(**x)


def test_without_nvcc_core_serves(op, x, monkeypatch):
    monkeypatch.setattr(devices, "has_usable_nvcc", lambda: False)
    switches.forget()
    core_serves(op, x, "no usable nvcc")
    monkeypatch.undo()
    switches.forget()


def test_on_another_architecture_core_serves(op, x, monkeypatch):
    with torch.no_grad(), use_backend("triton"):  # core looks at the card once, before it seems to be another
        op(**x)
    # Above what the capability names: the verifier's own answer.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert TileLang.capability.compute_capability == (9, 0)
    core_serves(op, x, "compute capability is 10.0, supported: 9.0 alone")


def test_a_build_that_fails_is_quarantined_and_core_serves(op, x, monkeypatch):
    def fails(*args, **choices):
        raise RuntimeError("nvcc fatal: unsupported gpu architecture")

    monkeypatch.setattr(scalar if op is chunk_gated_delta_rule else vector, "program", fails)
    with torch.no_grad(), use_backend("tilelang"), pytest.warns(RuntimeWarning, match="unsupported gpu architecture"):
        o, _ = op(**x)
    assert last_decision().backend == "triton"
    assert o.isfinite().all()
    monkeypatch.undo()
    core_serves(op, x, "quarantined: .*unsupported gpu architecture")


def test_views_that_begin_anywhere_are_copied(op, x):
    """TMA reads from 16-byte boundaries only."""
    shifted = dict(x)
    for name, t in x.items():
        if torch.is_tensor(t):
            shifted[name] = t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)
    with torch.no_grad(), use_backend("tilelang", strict=True):
        results = op(**x), op(**shifted)
    for a, b in zip(*results, strict=True):
        assert a.isfinite().all()
        assert torch.equal(a, b)


@pytest.mark.skipif(not CHECK.is_file(), reason="no benchmarks beside the tests")
def test_all_calls_of_the_check_equal_the_float64_recurrence():
    """Both dtypes, K and V of 64 and 128, dense, ragged and packed, grouped heads, states in both
    layouts, and what float16 does not hold."""
    done = subprocess.run([sys.executable, str(CHECK), "check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert done.stdout.count("ok  ") == 42


def test_the_conformance_kit_is_green():
    """In a process of its own: the kit needs the plugin as it is installed."""
    command = [sys.executable, "-m", "pytest", "--pyargs", "fla.testing.conformance", "--fla-backend", "tilelang"]
    if importlib.util.find_spec("xdist"):
        command += ["-n", "4"]
    done = subprocess.run(
        [*command, "--fla-require", "-q", "-p", "no:cacheprovider"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
