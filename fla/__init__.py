# SPDX-License-Identifier: MIT
"""fla: linear attention for PyTorch, with every op open to separately installed backends.

Importing the package imports neither torch, triton nor transformers, and scans no entry points. Layers and models are
loaded when they are first used; the Auto classes of transformers know the models from here on.
"""

from __future__ import annotations

import importlib
from pkgutil import extend_path
from typing import Any

__path__ = extend_path(__path__, __name__)
__version__ = "1.0.0.dev0"

from fla._later import install as _say_what_is_missing
from fla._later import missing
from fla.layers import __all__ as _layers
from fla.models import __all__ as _models
from fla.models._auto import install as _install

_HOME = {
    **dict.fromkeys(_layers, "fla.layers"),
    **{name: "fla.models" for name in _models if not name.endswith("Config")},
}
_PACKAGES = frozenset(
    {"backends", "cli", "convert", "decoding", "layers", "models", "modules", "ops", "settings", "testing", "utils"}
)

__all__ = list(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]

_install()
_say_what_is_missing()


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(missing(__name__, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
