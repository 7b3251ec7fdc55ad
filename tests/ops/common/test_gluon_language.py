# SPDX-License-Identifier: MIT
"""Kernels in Gluon find the same names with every version of Triton that has Gluon's Hopper instructions."""

from __future__ import annotations

import ast
import types
from pathlib import Path

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from triton.experimental.gluon import language

from fla.ops._common.gluon_language import gl

OPS = Path(__file__).parents[3] / "fla" / "ops"
FILES = [f for f in OPS.rglob("*.py") if "import gl\n" in f.read_text()]


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
