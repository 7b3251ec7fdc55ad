# SPDX-License-Identifier: MIT
"""The conformance kit for backends, a pytest plugin.

``pytest --pyargs fla.testing.conformance --fla-backend NAME`` tests an installed backend; :class:`BackendConformance`
is the same as a class to derive from. Importing this package imports neither torch nor the ops: names are looked up
when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fla.testing.cases import Case, cases
    from fla.testing.checks import Outcome
    from fla.testing.specs import SPECS, Input, OpSpec, Variant, add_spec
    from fla.testing.suite import BackendConformance
    from fla.testing.target import NotRegistered, Target, Unavailable, targets

_HOME = {
    "BackendConformance": "suite",
    "Case": "cases",
    "Input": "specs",
    "NotRegistered": "target",
    "OpSpec": "specs",
    "Outcome": "checks",
    "SPECS": "specs",
    "Target": "target",
    "Unavailable": "target",
    "Variant": "specs",
    "add_spec": "specs",
    "cases": "cases",
    "targets": "target",
}

__all__ = [
    "SPECS",
    "BackendConformance",
    "Case",
    "Input",
    "NotRegistered",
    "OpSpec",
    "Outcome",
    "Target",
    "Unavailable",
    "Variant",
    "add_spec",
    "cases",
    "targets",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "cases":
        # The module of that name is imported on the way and would hide the function.
        from fla.testing.cases import cases as value
    else:
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
