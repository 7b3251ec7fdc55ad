# SPDX-License-Identifier: MIT
"""Models of transformers. Importing this package imports neither transformers nor torch: classes are built on use."""

from __future__ import annotations

import importlib
from typing import Any

from fla._later import missing
from fla.models._index import FAMILIES

_HOME = {name: row.package for row in FAMILIES for name in row.names}

__all__ = list(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(missing(__name__, name))
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
