# SPDX-License-Identifier: MIT
"""Toy ops, and plugins installed as real dist-info folders on sys.path."""

from __future__ import annotations

import itertools
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch

from fla import settings
from fla.backends import CallFacts, dispatch, record, refresh
from fla.backends.discovery import DISCOVERY
from fla.backends.registry import REGISTRY

_numbers = itertools.count()

# What the plugins below say about themselves; they are for operation "toyop", whose function is `toy`.
GOOD = """
from fla.backends import BaseBackend, hookimpl

class Good(BaseBackend):
    backend_type = "good"
    env_var = "FLA_GOOD"
    def toy(self, q, k, v, scale=1.0, cu_seqlens=None, state_v_first=False):
        return ("good", scale)

@hookimpl
def register_backends(registry):
    registry.register("toyop", Good())
"""


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    """Each test begins without registrations, FLA_* variables, settings and things already said."""
    import os

    for name in [name for name in os.environ if name.startswith(("FLA_", "TRITON_INTERPRET"))]:
        monkeypatch.delenv(name)
    settings._said.clear()
    record.logged.clear()
    record.thread.decision = None
    before = REGISTRY.snapshot()
    known = dict(settings._known)
    yield
    settings.reset()
    REGISTRY._rows = before
    REGISTRY.invalidate()
    settings._known.clear()
    settings._known.update(known)


def make_toy(operation: str | None = None, **options):
    """A dispatched function and the name of its operation."""
    operation = operation or f"toy{next(_numbers)}"

    @dispatch(operation, facts=CallFacts(), **options)
    def toy(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float = 1.0,
        cu_seqlens: torch.Tensor | None = None,
        state_v_first: bool = False,
    ):
        """Says who ran."""
        return ("torch", scale)

    return toy, operation


@pytest.fixture
def toy():
    """``(function, operation)`` of a new op."""
    return make_toy()


@pytest.fixture
def qkv():
    return tuple(torch.randn(1, 4, 2, 8) for _ in range(3))


class Site:
    """A folder on sys.path into which plugins are installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(
        self,
        name: str,
        source: str,
        *,
        value: str | None = None,
        entry: str | None = None,
        metadata: bool = True,
        folder: Path | None = None,
        version: str = "1.0",
    ) -> Path:
        """Distribution ``fla-backend-<name>`` with module ``plugin_<name>``; the path of the module is returned."""
        folder = folder or self.folder
        module = folder / f"plugin_{name}.py"
        module.write_text(textwrap.dedent(source))
        info = folder / f"fla_backend_{name}-{version}.dist-info"
        info.mkdir()
        if metadata:
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fla-backend-{name}\nVersion: {version}\n")
        target = value or f"plugin_{name}"
        (info / "entry_points.txt").write_text(f"[fla.backends]\n{entry or name} = {target}\n")
        return module

    def refresh(self) -> None:
        """Discover anew; what broken plugins cause to be said is not of interest here."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            refresh()

    def plugin(self, name: str) -> dict:
        return next(p.to_dict() for p in DISCOVERY.plugins.values() if p.name == name)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Plugins installed here are not discovered before the first call (or ``site.refresh()``)."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    DISCOVERY.scanned = False
    DISCOVERY.plugins.clear()
    REGISTRY.invalidate()
    yield Site(folder)
    monkeypatch.undo()
    for module in [m for m in sys.modules if m.startswith("plugin_")]:
        del sys.modules[module]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refresh()
