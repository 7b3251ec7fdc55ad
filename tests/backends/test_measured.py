# SPDX-License-Identifier: MIT
"""A backend steps back where core was measured to be faster."""

from __future__ import annotations

import pytest
import torch

from fla.backends import Measured, Point, devices
from fla.ops.kda import chunk_kda

LONG = Point(length=8192, chains=96, backend_ms=1.5, core_ms=0.9)
SHORT = Point(length=1024, chains=4, backend_ms=0.05, core_ms=0.09)
TABLE = Measured((LONG, SHORT), card="H200", versions="torch 2.11", core="1.0.0.dev0")
HERE = {"triton": True, "card": "NVIDIA H200", "core": "1.0.0.dev0"}


def test_it_says_what_was_measured():
    text = TABLE.slower(8192, 96, **HERE)
    assert text.startswith("core's kernels are faster: 0.9 ms against 1.5 ms for 8192 tokens, 96 sequences times heads")
    assert "measured on H200, torch 2.11, core 1.0.0.dev0" in text


def test_the_nearest_measured_call_decides():
    assert TABLE.slower(16384, 128, **HERE)
    assert TABLE.slower(512, 2, **HERE) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"triton": False},  # core would run PyTorch
        {"card": "NVIDIA B200"},
        {"card": None},
        {"core": "0.9"},  # a core from before the measurement
    ],
    ids=str,
)
def test_nothing_is_said_where_nothing_was_measured(changes):
    assert TABLE.slower(8192, 96, **{**HERE, **changes}) is None


def test_no_tokens_are_nobodys_race():
    assert TABLE.slower(0, 96, **HERE) is None
    assert TABLE.slower(8192, 0, **HERE) is None
    assert Measured((), card="H200", versions="", core="0").slower(1, 1, **HERE) is None


@pytest.fixture
def h200(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.setattr(devices, "has_triton_driver", lambda kind: True)
    monkeypatch.setattr(chunk_kda.op, "triton_path", chunk_kda.op.triton_path or object())
    from fla.backends import measured

    measured._answer.cache_clear()
    yield
    measured._answer.cache_clear()


def values(B, T, HV):
    return torch.empty(B, T, HV, 128, dtype=torch.bfloat16, device="meta")


def test_a_call_is_judged_by_its_sizes_and_the_card(h200, monkeypatch):
    assert TABLE.rejection(chunk_kda, values(1, 8192, 96)).code == "slower"
    assert TABLE.rejection(chunk_kda, values(1, 1024, 4)) is None
    # Many documents are many short chains.
    cuts = torch.empty(9, dtype=torch.int32, device="meta")
    assert TABLE.rejection(chunk_kda, values(1, 4096, 1), cuts) is None


def test_core_on_pytorch_is_never_taken_for_faster(h200, monkeypatch):
    monkeypatch.setattr(chunk_kda.op, "triton_path", None)
    assert TABLE.rejection(chunk_kda, values(1, 8192, 96)) is None
