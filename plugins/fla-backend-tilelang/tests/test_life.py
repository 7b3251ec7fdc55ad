# SPDX-License-Identifier: MIT
"""Importing changes nothing; missing tools are named; what cannot be built is quarantined and core serves the call."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fla_backend_tilelang import plugin, rule

from fla.backends import BackendRegistry, devices, last_decision, register, use_backend
from fla.ops.gated_delta_rule import chunk_gated_delta_rule

SRC = Path(__file__).parents[1] / "src"


def test_importing_the_plugin_imports_neither_tilelang_nor_torch():
    code = "import sys, fla_backend_tilelang.plugin; assert not {'tilelang', 'torch', 'tvm'} & set(sys.modules)"
    env = {"PYTHONPATH": f"{SRC}:{Path(__file__).parents[3]}", "PATH": "/usr/bin"}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


def test_it_says_that_tilelang_is_missing(monkeypatch):
    monkeypatch.setattr(devices, "has_module", lambda name: False)
    assert not plugin.GatedDeltaRule.is_available()
    assert plugin.GatedDeltaRule.unavailable_reason() == "module tilelang is not installed"


def test_it_says_that_nvcc_is_missing(monkeypatch):
    monkeypatch.setattr(devices, "has_module", lambda name: True)
    monkeypatch.setattr(devices, "has_usable_nvcc", lambda: False)
    assert not plugin.KDA.is_available()
    assert plugin.KDA.unavailable_reason().startswith("no usable nvcc")


def test_a_build_that_fails_is_quarantined_and_core_serves(monkeypatch):
    from fla_backend_tilelang import scalar

    class OnTheCPU(plugin.GatedDeltaRule):
        backend_type = "tilelang_here"
        package_name = None
        env_var = None
        capability = dataclasses.replace(plugin.TileLang.capability, device_types=("cpu",), compute_capability=None)

        @classmethod
        def is_available(cls):
            return True

    def fails(*args):
        raise RuntimeError("nvcc fatal: unsupported gpu architecture")

    monkeypatch.setattr(scalar, "forward", fails)
    made = OnTheCPU()
    register("gated_delta_rule", made)
    try:
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 8, 1, 64).bfloat16() for _ in range(3))
        g, beta = -torch.rand(1, 8, 1), torch.rand(1, 8, 1)
        with torch.no_grad(), pytest.warns(RuntimeWarning, match="unsupported gpu architecture"):
            o, _ = chunk_gated_delta_rule(q, k, v, g, beta)
        assert last_decision().backend == "torch"
        assert o.isfinite().all()
        with torch.no_grad(), use_backend("tilelang_here"):
            chunk_gated_delta_rule(q, k, v, g, beta)
        assert last_decision().backend == "torch"  # no second attempt
    finally:
        BackendRegistry("gated_delta_rule").unregister(made)


def test_the_tables_as_measured():
    here = {"triton": True, "card": "NVIDIA H200", "core": "1.0.0.dev0"}
    for table in (rule.GATED_DELTA_RULE, rule.KDA):
        assert table.slower(8192, 96, **here) is None
        assert table.slower(32768, 16, **here)  # core cuts it along time
        assert table.slower(64, 2, **here)  # the host takes longer than the device
