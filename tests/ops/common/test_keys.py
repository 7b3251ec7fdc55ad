# SPDX-License-Identifier: MIT
"""A kernel has one key in the cache on disk, whatever the process did before."""

from __future__ import annotations

import importlib.util

import pytest

pytest.importorskip("triton")

from fla.ops._common import launch

SOURCE = """
import triton.language as tl
from triton.runtime.jit import JITFunction

LIMIT = tl.constexpr(2.0)


@JITFunction
def low(x):
    return x * LIMIT


@JITFunction
def middle(x):
    return low(x) + 1


@JITFunction
def kernel(x):
    tl.store(x, middle(tl.load(x)))
"""


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "_hashed", set())
    path = tmp_path / "some_kernels.py"
    path.write_text(SOURCE)

    def load():
        spec = importlib.util.spec_from_file_location("some_kernels", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize("before", [(), ("low",), ("low", "middle")])
def test_keys_do_not_depend_on_what_was_hashed_before(fresh, before):
    first, other = fresh(), fresh()
    launch.hash_from_below(first.kernel)
    for name in before:
        assert getattr(other, name).cache_key
    launch.hash_from_below(other.kernel)
    assert other.kernel.cache_key == first.kernel.cache_key


def test_a_constant_of_a_callee_is_part_of_the_key(fresh, tmp_path):
    first = fresh()
    launch.hash_from_below(first.kernel)
    path = tmp_path / "some_kernels.py"
    path.write_text(SOURCE.replace("constexpr(2.0)", "constexpr(3.0)"))
    other = fresh()
    launch.hash_from_below(other.kernel)
    assert other.kernel.cache_key != first.kernel.cache_key
