# SPDX-License-Identifier: MIT
"""The pages of the plugins say what the code says."""

from __future__ import annotations

import importlib.util
import sys

import pytest


@pytest.fixture
def rendering(root, monkeypatch):
    spec = importlib.util.spec_from_file_location("docs_render", root / "docs" / "backends" / "render.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(module)
    return module


def test_no_page_drifts_from_the_code(rendering):
    assert rendering.PAGES
    for page in rendering.PAGES:
        path, text, wanted = rendering.written(page)
        assert text == wanted, f"{path.name} is stale; run: python docs/backends/render.py"


def test_a_changed_verifier_is_noticed(rendering, monkeypatch):
    page = rendering.PAGES[0]
    backend = rendering.load(page.backend)
    monkeypatch.setattr(backend, "chunk_kda_verifier", lambda self, q: (False, "something else"))
    _, text, wanted = rendering.written(page)
    assert text != wanted
    assert "something else" in wanted


def test_every_plugin_has_a_page(root, rendering):
    names = {
        p.name.removeprefix("fla-backend-") for p in (root / "plugins").iterdir() if (p / "pyproject.toml").exists()
    }
    assert names <= {page.name for page in rendering.PAGES}
