# SPDX-License-Identifier: MIT
"""What the machine has, found out without touching it."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys

import pytest

from fla.backends import devices


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine without nvcc anywhere."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [])
    monkeypatch.setattr(devices, "SYSTEM_CUDA", tmp_path / "absent")
    devices.find_nvcc.cache_clear()
    yield tmp_path
    devices.find_nvcc.cache_clear()


def test_no_source_of_nvcc(bare):
    assert not devices.has_usable_nvcc()


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_nvcc_under_a_variable(bare, monkeypatch, variable):
    (bare / "bin").mkdir()
    (bare / "bin" / "nvcc").touch()
    monkeypatch.setenv(variable, str(bare))
    assert devices.find_nvcc() == (str(bare / "bin" / "nvcc"), variable)


def test_nvcc_on_the_path(bare, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: "/somewhere/nvcc")
    assert devices.has_usable_nvcc()


@pytest.mark.parametrize(
    ("file", "usable"), [("nvidia/cuda_nvcc/bin/nvcc", True), ("nvidia/cuda_nvcc/bin/ptxas", False)]
)
def test_wheel_counts_when_it_holds_the_compiler(bare, monkeypatch, file, usable):
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [file] if name == "nvidia-cuda-nvcc" else [])
    assert devices.has_usable_nvcc() is usable


def test_nvcc_of_the_system(bare, monkeypatch):
    monkeypatch.setattr(devices, "SYSTEM_CUDA", bare)
    (bare / "bin").mkdir()
    (bare / "bin" / "nvcc").touch()
    assert devices.has_usable_nvcc()


def test_answers_before_torch_is_imported_are_not_kept():
    code = """
import sys
from fla.backends import devices, report
report()
assert devices.accelerators() == () and devices._accelerators is None
assert not devices.has_triton_driver("cuda") and not devices._drivers
import torch
devices.accelerators()
assert devices._accelerators is not None
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_module_that_is_absent_or_has_an_absent_parent():
    assert devices.has_module("json")
    assert not devices.has_module("no_such_module_at_all")
    assert not devices.has_module("no_such_module_at_all.child")
