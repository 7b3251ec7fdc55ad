# SPDX-License-Identifier: MIT
"""Selection on a machine with a GPU: the Triton path, capabilities of the card, memory that runs out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fla.backends import (
    BackendUnavailable,
    BaseBackend,
    Capability,
    dispatch,
    explain,
    last_decision,
    register,
    use_backend,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture
def scaled(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    @dispatch("gpu_toy", triton="toy_triton:scaled")
    def scaled(q: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return q * scale

    return scaled


def backend(name, **attributes):
    attributes.setdefault("scaled", lambda self, q, scale=1.0: q * scale)
    return type(name, (BaseBackend,), {"backend_type": name, **attributes})()


def test_tensors_of_the_gpu_take_triton_and_those_of_the_cpu_torch(scaled):
    x = torch.arange(1000.0)
    for _ in range(2):
        assert torch.equal(scaled(x.cuda(), 2.0).cpu(), 2 * x)
        assert last_decision().backend == "triton"
        assert torch.equal(scaled(x, 2.0), 2 * x)
        assert last_decision().backend == "torch"
    with use_backend("torch", strict=True):
        scaled(x.cuda())
        assert last_decision().backend == "torch"
    with use_backend("triton", strict=True):
        scaled(x.cuda())
        assert last_decision().backend == "triton"
        with pytest.raises(BackendUnavailable, match="no Triton driver for cpu"):
            scaled(x)
    meta = torch.empty(1 << 40, device="meta")
    assert explain(scaled, meta).chosen == "triton"


def test_compute_capability_of_the_card_is_compared(scaled):
    found = torch.cuda.get_device_capability()
    register("gpu_toy", backend("later", capability=Capability(device_types=("cuda",), compute_capability=(99, 0))))
    register("gpu_toy", backend("now", priority=9, capability=Capability(compute_capability=found)))
    scaled(torch.zeros(4, device="cuda"))
    assert last_decision().backend == "now"
    reason = last_decision().rejections[0].reason
    assert reason == f"compute capability is {found[0]}.{found[1]}, needed: 99.0"


def test_memory_that_runs_out_propagates_and_what_fails_otherwise_falls_back(scaled):
    register("gpu_toy", backend("greedy", scaled=lambda self, q, scale=1.0: q.new_empty(1 << 45)))
    x = torch.zeros(4, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        scaled(x)
    register(
        "gpu_toy",
        backend("greedy", scaled=lambda self, q, scale=1.0: q.new_empty(-1)),
        override=True,
    )
    with pytest.warns(RuntimeWarning, match="greedy"):
        scaled(x)
    assert last_decision().backend == "triton"


def test_calls_on_the_cpu_do_not_initialise_the_gpu():
    code = """
import torch
from fla.backends import dispatch, explain, report
@dispatch("quiet", triton="toy_triton:scaled")
def scaled(q: torch.Tensor, scale: float = 1.0):
    return q * scale
x = torch.zeros(4)
scaled(x)
explain(scaled, x)
report()
assert not torch.cuda.is_initialized()
import sys
assert "triton" not in sys.modules
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
