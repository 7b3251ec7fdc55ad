# SPDX-License-Identifier: MIT
"""Packages whose names are imported when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from fla._later import missing

__all__ = ["lazy"]


def lazy(package: str, home: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: its name.
        home: public names and the modules under the package that hold them.
    """
    names = vars(sys.modules[package])

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(missing(package, name))
        value = names[name] = getattr(importlib.import_module(f"{package}.{home[name]}"), name)
        return value

    return get, lambda: sorted({*names, *home})
