# SPDX-License-Identifier: MIT
"""When the plugin steps back for core's own kernels."""

from __future__ import annotations

import torch
from fla_backend_flashkda.rule import MEASURED

from fla.backends import Measured, Rejection, explain, use_backend
from fla.ops.kda import chunk_kda


def test_the_table_as_measured():
    """The calls of the project's targets go to core, a handful of tokens stays."""
    here = {"triton": True, "card": "NVIDIA H200", "core": MEASURED.core}
    assert MEASURED.slower(8192, 96, **here)
    assert MEASURED.slower(2048, 4 * 16, **here)
    assert MEASURED.slower(32768, 16, **here)
    assert MEASURED.slower(64, 2, **here) is None


def test_asking_by_name_overrules_it(hopper, monkeypatch, call):
    monkeypatch.setattr(Measured, "rejection", lambda *call: Rejection("slower", "core is faster"))
    with torch.no_grad():
        found = explain(chunk_kda, **call()).verdict("flash_kda")
        assert (found.code, found.reason) == ("slower", "core is faster")
        with use_backend("flash_kda"):
            assert explain(chunk_kda, **call()).chosen == "flash_kda"
        monkeypatch.setenv("FLA_FLASH_KDA", "1")
        found = explain(chunk_kda, **call())
    assert found.chosen == "flash_kda"
    assert found.verdict("flash_kda").reason == "asked for by name, though: core is faster"
