# SPDX-License-Identifier: MIT
"""When the plugin steps back for core's own kernels."""

from __future__ import annotations

import pytest
import torch
from fla_backend_flashkda import rule
from fla_backend_flashkda.rule import CAPABILITY, CORE, Point, slower

from fla.backends import explain, use_backend
from fla.ops.kda import chunk_kda

LARGE = Point(tokens=8192, heads=96, flash_ms=1.45, core_ms=0.94)
SMALL = Point(tokens=1024, heads=4, flash_ms=0.05, core_ms=0.09)
HERE = {"triton": True, "capability": CAPABILITY, "core": CORE, "table": (LARGE, SMALL)}


def test_it_steps_back_where_core_was_faster_and_says_what_was_measured():
    text = slower(8192, 96, **HERE)
    assert text.startswith("core's kernels are faster: 0.94 ms against 1.45 ms for 8192 tokens of 96 heads")
    assert rule.CARD in text
    assert f"core {CORE}" in text


def test_the_nearest_measured_size_decides():
    assert slower(16384, 128, **HERE)
    assert slower(512, 2, **HERE) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"triton": False},  # core would run PyTorch
        {"capability": (10, 0)},  # another card
        {"capability": None},
        {"core": "0.9"},  # a core from before the measurement
        {"table": ()},
    ],
    ids=str,
)
def test_it_does_not_where_nothing_was_measured(changes):
    assert slower(8192, 96, **{**HERE, **changes}) is None


def test_no_tokens_are_nobodys_race():
    assert slower(0, 96, **HERE) is None


def test_asking_by_name_overrules_it(hopper, monkeypatch, call):
    monkeypatch.setattr("fla_backend_flashkda.rule.verdict", lambda q: "core is faster")
    with torch.no_grad():
        found = explain(chunk_kda, **call()).verdict("flash_kda")
        assert (found.code, found.reason) == ("slower", "core is faster")
        with use_backend("flash_kda"):
            assert explain(chunk_kda, **call()).chosen == "flash_kda"
        monkeypatch.setenv("FLA_FLASH_KDA", "1")
        found = explain(chunk_kda, **call())
    assert found.chosen == "flash_kda"
    assert found.verdict("flash_kda").reason == "asked for by name, though: core is faster"


def test_core_on_pytorch_is_never_taken_for_faster(hopper, monkeypatch):
    from fla.backends import devices

    monkeypatch.setattr(rule, "TABLE", (LARGE,))
    monkeypatch.setattr(rule, "_verdict", rule._verdict.__wrapped__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(devices, "has_triton_driver", lambda kind: False)
    assert rule.verdict(torch.empty(1, 8192, 96, 128, device="meta")) is None


def test_the_card_of_a_meta_tensor_is_this_machines(hopper, monkeypatch, call):
    """What explain says on a Hopper card once core has a Triton path there."""
    from fla.backends import devices

    monkeypatch.setattr(rule, "TABLE", (LARGE,))
    monkeypatch.setattr(rule, "slower", lambda *a, **k: slower(*a, **{**k, "table": (LARGE,)}))
    monkeypatch.setattr(rule, "_verdict", rule._verdict.__wrapped__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(devices, "has_triton_driver", lambda kind: True)
    monkeypatch.setattr(chunk_kda.op, "triton_path", chunk_kda.op.triton_path or object())
    assert rule.verdict(call(T=8192, H=96)["q"]).startswith("core's kernels are faster")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (12, 0))
    assert rule.verdict(call(T=8192, H=96)["q"]) is None
