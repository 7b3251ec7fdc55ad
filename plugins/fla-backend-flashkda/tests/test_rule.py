# SPDX-License-Identifier: MIT
"""When the plugin steps back for core's own kernels."""

from __future__ import annotations

import pytest
import torch
from fla_backend_flashkda import rule
from fla_backend_flashkda.rule import CARD, CORE, Point, slower

from fla.backends import explain, use_backend
from fla.ops.kda import chunk_kda

LONG = Point(length=8192, chains=96, flash_ms=1.5, core_ms=0.9)
SHORT = Point(length=1024, chains=4, flash_ms=0.05, core_ms=0.09)
HERE = {"triton": True, "card": f"NVIDIA {CARD}", "core": CORE, "table": (LONG, SHORT)}


def test_it_steps_back_where_core_was_faster_and_says_what_was_measured():
    text = slower(8192, 96, **HERE)
    assert text.startswith("core's kernels are faster: 0.9 ms against 1.5 ms for 8192 tokens, 96 sequences times heads")
    assert f"measured on {CARD}, {rule.WITH}, core {CORE}" in text


def test_the_nearest_measured_call_decides():
    assert slower(16384, 128, **HERE)
    assert slower(512, 2, **HERE) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"triton": False},  # core would run PyTorch
        {"card": "NVIDIA B200"},
        {"card": None},
        {"core": "0.9"},  # a core from before the measurement
        {"table": ()},
    ],
    ids=str,
)
def test_it_does_not_where_nothing_was_measured(changes):
    assert slower(8192, 96, **{**HERE, **changes}) is None


def test_no_tokens_are_nobodys_race():
    assert slower(0, 96, **HERE) is None
    assert slower(8192, 0, **HERE) is None


def test_the_table_as_measured():
    """The calls of the project's targets go to core, a handful of tokens stays."""
    here = {k: v for k, v in HERE.items() if k != "table"}
    assert slower(8192, 96, **here)
    assert slower(2048, 4 * 16, **here)
    assert slower(32768, 16, **here)
    assert slower(64, 2, **here) is None


def test_asking_by_name_overrules_it(hopper, monkeypatch, call):
    monkeypatch.setattr("fla_backend_flashkda.rule.verdict", lambda *q: "core is faster")
    with torch.no_grad():
        found = explain(chunk_kda, **call()).verdict("flash_kda")
        assert (found.code, found.reason) == ("slower", "core is faster")
        with use_backend("flash_kda"):
            assert explain(chunk_kda, **call()).chosen == "flash_kda"
        monkeypatch.setenv("FLA_FLASH_KDA", "1")
        found = explain(chunk_kda, **call())
    assert found.chosen == "flash_kda"
    assert found.verdict("flash_kda").reason == "asked for by name, though: core is faster"


@pytest.fixture
def h200(hopper, monkeypatch):
    """That card, with core's Triton path."""
    from fla.backends import devices

    monkeypatch.setattr(rule, "_verdict", rule._verdict.__wrapped__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.setattr(devices, "has_triton_driver", lambda kind: True)
    monkeypatch.setattr(chunk_kda.op, "triton_path", chunk_kda.op.triton_path or object())


def test_it_looks_at_the_card_and_at_the_calls_sizes(h200, monkeypatch, call):
    q = call(T=8192, H=96)["q"]
    assert rule.verdict(q).startswith("core's kernels are faster")
    assert rule.verdict(call(T=32, H=2)["q"]) is None
    # The same tokens in documents are short chains.
    packed = torch.empty(3, dtype=torch.int32, device="meta")
    assert rule.verdict(call(T=64, H=1)["q"], packed) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H100 80GB HBM3")
    assert rule.verdict(q) is None


def test_core_on_pytorch_is_never_taken_for_faster(h200, monkeypatch, call):
    from fla.backends import devices

    q = call(T=8192, H=96)["q"]
    monkeypatch.setattr(devices, "has_triton_driver", lambda kind: False)
    assert rule.verdict(q) is None
    monkeypatch.setattr(devices, "has_triton_driver", lambda kind: True)
    monkeypatch.setattr(chunk_kda.op, "triton_path", None)
    assert rule.verdict(q) is None
