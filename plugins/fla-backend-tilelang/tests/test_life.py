# SPDX-License-Identifier: MIT
"""Importing changes nothing; missing tools are named; what cannot be built is quarantined and core serves the call."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import re
import subprocess
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from fla_backend_tilelang import plugin, programs, rule

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

        def probe(self):
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


@pytest.fixture
def tilelang(monkeypatch):
    """A module in the place of tilelang whose compile can be set."""
    made = types.ModuleType("tilelang")
    made.PassConfigKey = types.SimpleNamespace(TL_ENABLE_FAST_MATH="fast")
    kernels = types.SimpleNamespace(scan=lambda **choices: choices)
    monkeypatch.setitem(sys.modules, "tilelang", made)
    monkeypatch.setitem(sys.modules, "fla_backend_tilelang.kernels.scan", kernels)
    programs.program.cache_clear()
    yield made
    programs.program.cache_clear()


def test_an_error_of_a_build_has_what_nvcc_said_and_not_the_source(tilelang):
    def compile(made, **options):
        source = "__global__ void f() {}\n" * 5000
        raise RuntimeError(source + "Compilation error:\nnvcc fatal: no sm_90a\nCommand: nvcc\n")

    tilelang.compile = compile
    with pytest.raises(programs.BuildError) as found:
        programs.program("scan", "scan", K=64)
    assert str(found.value) == "program scan was not built (RuntimeError: nvcc fatal: no sm_90a\nCommand: nvcc)"
    assert found.value.__suppress_context__


def test_what_nvcc_says_at_length_is_cut(tilelang):
    def compile(made, **options):
        raise RuntimeError("a" + "x" * 100_000 + "b")

    tilelang.compile = compile
    with pytest.raises(programs.BuildError) as found:
        programs.program("scan", "scan", K=64)
    assert len(str(found.value)) < 2200
    assert re.search(r": ax+ \.\.\. x+b\)$", str(found.value))


@pytest.mark.parametrize("chosen", [None, "7"])
def test_a_build_does_not_wait_without_end(tilelang, monkeypatch, chosen):
    monkeypatch.delenv(programs.PATIENCE, raising=False)
    if chosen is not None:
        monkeypatch.setenv(programs.PATIENCE, chosen)
    seen = []
    tilelang.compile = lambda made, **options: seen.append(os.environ[programs.PATIENCE])
    programs.program("scan", "scan", K=64)
    assert seen == [chosen or programs.SECONDS]
    assert os.environ.get(programs.PATIENCE) == chosen


def test_threads_build_one_after_the_other(tilelang):
    now, most = [], []

    def compile(made, **options):
        now.append(made)
        most.append(len(now))
        time.sleep(0.02)
        now.pop()

    tilelang.compile = compile
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda K: programs.program("scan", "scan", K=K), range(4)))
    assert most == [1, 1, 1, 1]


def test_a_forked_child_can_build(tilelang):
    tilelang.compile = lambda made, **options: made
    with programs._building:
        child = os.fork()
        if not child:
            os._exit(0 if programs.program("scan", "scan", K=64) == {"K": 64} else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(13, "Permission denied", "/home/x/.tilelang"), "TILELANG_CACHE_DIR names a folder for its cache"),
        (ImportError("libtvm.so: cannot open"), r"tilelang cannot be loaded \(ImportError: libtvm.so: cannot open\)"),
    ],
)
def test_a_tilelang_that_cannot_be_loaded_stays_out_with_the_reason(monkeypatch, error, text):
    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "tilelang":
                raise error

    monkeypatch.delitem(sys.modules, "tilelang", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    works, reason = plugin.KDA().probe()
    assert not works
    assert re.search(text, reason)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ("0.1.14", "tilelang 0.1.14 is installed, supported: >=0.1.15,<0.2"),
        ("0.1.15", None),
        ("0.1.16.dev3", None),
        ("0.2.0", "tilelang 0.2.0 is installed, supported: >=0.1.15,<0.2"),
    ],
)
def test_it_wants_a_tilelang_that_it_was_written_for(monkeypatch, found, reason):
    monkeypatch.setattr(devices, "has_module", lambda name: True)
    monkeypatch.setattr(devices, "has_usable_nvcc", lambda: True)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    assert plugin.KDA.is_available() is (reason is None)
    assert plugin.KDA.unavailable_reason() == reason
    pyproject = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"tilelang{plugin.VERSIONS};' in pyproject


def test_the_tables_as_measured():
    here = {"triton": True, "card": "NVIDIA H200", "core": "1.0.0.dev0"}
    for table in (rule.GATED_DELTA_RULE, rule.KDA):
        assert table.slower(8192, 96, **here) is None
        assert table.slower(32768, 16, **here)  # core cuts it along time
        assert table.slower(64, 2, **here)  # the host takes longer than the device
