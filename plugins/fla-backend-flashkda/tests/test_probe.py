# SPDX-License-Identifier: MIT
"""The probe tells wheels that work from wheels that only import; importing the plugin does nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fla_backend_flashkda import probe
from fla_backend_flashkda.plugin import FlashKDA

CPU = torch.device("cpu")
SRC = Path(__file__).parents[1] / "src"


def check():
    return probe.check(FlashKDA().chunk_kda, CPU)


def test_a_wheel_that_keeps_its_contract_passes(stub):
    assert check() == (True, None)


def test_a_wheel_that_raises_at_every_call_is_refused(wheel):
    def fwd(*args, **kwargs):
        raise RuntimeError("all tensors must be on CUDA")

    wheel(fwd)
    assert check() == (False, "a call of flash_kda.fwd failed (RuntimeError: all tensors must be on CUDA)")


def test_a_wheel_that_cannot_be_imported_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_kda", None)
    ok, reason = check()
    assert not ok
    assert "ModuleNotFoundError" in reason


def garbage(stub):
    def fwd(q, k, v, g, beta, scale, out, **kwargs):
        out.fill_(1)
        kwargs["final_state"].zero_()

    return fwd, "wrong outputs"


def silence(stub):
    def fwd(q, k, v, g, beta, scale, out, **kwargs):
        stub.fwd(q, k, v, g, beta, scale, out, **kwargs)
        out.fill_(float("nan"))

    return fwd, "wrong outputs (RMS ratio nan)"


def other_layout(stub):
    def fwd(q, k, v, g, beta, scale, out, **kwargs):
        stub.fwd(q, k, v, g, beta, scale, out, **kwargs)
        kwargs["final_state"].copy_(kwargs["final_state"].mT.clone())

    return fwd, "wrong final states"


def one_document(stub):
    def fwd(q, k, v, g, beta, scale, out, **kwargs):
        final, cu = kwargs.pop("final_state"), kwargs.pop("cu_seqlens")
        state = kwargs.pop("initial_state")[:1].contiguous()
        stub.fwd(q, k, v, g, beta, scale, out, **kwargs, initial_state=state, final_state=final[:1])
        assert len(cu) == 3

    return fwd, "wrong"


@pytest.mark.parametrize("defect", [garbage, silence, other_layout, one_document])
def test_a_wheel_that_computes_something_else_is_refused(wheel, stub, defect):
    fwd, text = defect(stub)
    wheel(fwd)
    ok, reason = check()
    assert not ok
    assert text in reason


def test_without_a_device_it_does_not_try(stub, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert FlashKDA().probe() == (False, "no CUDA device")


def test_under_graph_capture_it_does_not_try(stub, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    ok, reason = FlashKDA().probe()
    assert not ok
    assert "graph capture" in reason


def test_the_random_state_is_left_alone(stub):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    check()
    assert torch.equal(before, torch.get_rng_state())


def test_importing_the_plugin_imports_no_kernels_and_changes_nothing():
    """Not even torch: the module is read by `fla backends list`."""
    code = """
import os, sys
environment = dict(os.environ)
import fla.backends
before = set(sys.modules)
import fla_backend_flashkda.plugin
new = {name.partition(".")[0] for name in set(sys.modules) - before}
assert not new & {"torch", "triton", "flash_kda", "flash_kda_C"}, new
assert dict(os.environ) == environment
"""
    path = [str(SRC), *(p for p in sys.path if p)]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{code}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
