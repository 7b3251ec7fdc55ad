# SPDX-License-Identifier: MIT
"""The package stays small, and says things once; `benchmarks/redundancy.py` measures both."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "redundancy.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("redundancy", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["redundancy"] = module  # named tuples look their module up
    spec.loader.exec_module(module)
    return module


def test_layers_and_models_are_small_and_say_things_once(script: ModuleType):
    measure = script.measure("fla/models", "fla/layers")
    assert measure.lines < 5500
    assert measure.share(measure.redundant) < 6


def test_the_package_says_things_once(script: ModuleType):
    measure = script.measure("fla")
    assert measure.share(measure.redundant) < 4


def test_what_is_counted(script: ModuleType, tmp_path: Path):
    block = "".join(f"    x{i} = {i}  # note\n\n" for i in range(10))
    (tmp_path / "a.py").write_text(f"def f():\n{block}    # only a note\n")
    (tmp_path / "b.py").write_text(f"class A:\n    def f():\n{block.replace('    ', '        ')}")
    (tmp_path / "c.py").write_text('y = "# no comment"\n')
    measure, redundant = script.repeats(script.find_files([tmp_path]))
    assert (measure.files, measure.lines, measure.counted) == (3, 22 + 22 + 1, 11 + 12 + 1)
    # `def f():` and ten lines in both files; the second file's are redundant.
    assert (measure.duplicate, measure.redundant) == (22, 11)
    assert min(redundant[tmp_path / "b.py"]) == 2
    once = script.repeats([tmp_path / "a.py"])[0]
    assert once.redundant == 0
    (tmp_path / "a.py").write_text("x = 1\n" * 20)
    alone = script.repeats([tmp_path / "a.py"])[0]
    assert (alone.duplicate, alone.redundant) == (20, 12)
