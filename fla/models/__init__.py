# SPDX-License-Identifier: MIT
"""Models of transformers. Importing this package imports neither transformers nor torch: classes are built on use."""

from __future__ import annotations

from fla._lazy import lazy
from fla.models._index import FAMILIES

_HOME = {name: row.package for row in FAMILIES for name in row.names}

__all__ = list(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]
__getattr__, __dir__ = lazy(__name__, _HOME)
