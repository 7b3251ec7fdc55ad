# SPDX-License-Identifier: MIT
"""Names of the reference package that are not here yet say so, however they are asked for."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import fla

MISSING = [
    line.strip().split(":")
    for line in (Path(__file__).parents[1] / "data" / "api-missing.txt").read_text().splitlines()
    if line.startswith(("fla.layers:", "fla.models:"))
]
SAYS = "not in this version of fla yet"


@pytest.mark.parametrize(("module", "name"), MISSING, ids=lambda x: x)
def test_importing_a_name_that_is_not_here_yet(module: str, name: str):
    with pytest.raises(ImportError, match=SAYS):
        exec(f"from {module} import {name}")
    room = importlib.import_module(module)
    with pytest.raises(AttributeError, match=SAYS):
        getattr(room, name)
    assert not hasattr(room, name)
    if not name.endswith("Config"):
        with pytest.raises(ImportError, match=SAYS):
            exec(f"from fla import {name}")
        assert getattr(fla, name, None) is None


def test_importing_a_package_that_is_not_here_yet():
    with pytest.raises(ModuleNotFoundError, match=SAYS) as error:
        importlib.import_module("fla.models.rwkv7.modeling_rwkv7")
    assert error.value.name == "fla.models.rwkv7"
    with pytest.raises(ModuleNotFoundError, match=SAYS) as error:
        importlib.import_module("fla.layers.mesa_net")
    assert error.value.name == "fla.layers.mesa_net"


def test_other_names_are_misspelt_as_ever():
    with pytest.raises(ImportError, match="cannot import name"):
        exec("from fla.models import RWKV77Config")
    with pytest.raises(AttributeError, match="has no attribute"):
        fla.layers.RWKV77Attention  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match="No module named"):
        importlib.import_module("fla.models.rwkv77")
