# SPDX-License-Identifier: MIT
"""Kernels in Gluon find the same names with every version of Triton that has Gluon's Hopper instructions."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

import triton
from triton.experimental.gluon import language

from fla.ops._common.gluon_language import gl

ROOT = Path(__file__).parents[3]
TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
FILES = [f for f in (ROOT / "fla" / "ops").rglob("*.py") if "import gl\n" in f.read_text()]


def test_the_barrier_has_one_name():
    assert gl.thread_barrier in (getattr(language, name, None) for name in ("thread_barrier", "barrier"))


def test_tritons_module_stays_as_it_is():
    assert gl is language or not hasattr(language, "thread_barrier")
    assert type(gl) is types.ModuleType
    assert gl.__name__ == language.__name__


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_all_that_a_kernel_names_is_there(file):
    used = [
        node.attr
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "gl"
    ]
    assert used
    assert [name for name in used if not hasattr(gl, name)] == []


@pytest.mark.skipif(not (TOOL.exists() and shutil.which("gcc")), reason="needs gcc and Triton's tools for NVIDIA")
def test_kernels_compile_with_the_triton_that_is_installed(tmp_path):
    script = ROOT / "benchmarks" / "ops" / "check_gluon.py"
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(script), "--quick", "delta_rule", "kda", "retention"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode == 2:
        pytest.skip(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {line.split()[-1] for line in done.stdout.splitlines() if line.startswith("ok ")} >= {
        "groups_scan", "groups_reverse", "vector_groups", "linear_groups_scan",
    }  # fmt: skip
