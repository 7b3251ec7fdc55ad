# SPDX-License-Identifier: MIT
from __future__ import annotations

import pytest
import torch

from fla.cli import _checks
from fla.cli._checks import Mismatch, Skip, run_steps
from fla.models._index import FAMILIES


def test_list_names_every_op_and_family(fla_cli):
    listed = fla_cli("smoke", "--list").out.split()
    assert listed == [*(f"ops/{name}" for name in _checks.OPS), *(f"models/{f.model_type}" for f in FAMILIES)]
    assert fla_cli("smoke", "--list", "--json").json == listed


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_ops_agree_with_their_slow_form(fla_cli, dtype):
    result = fla_cli("smoke", "--only", *(f"ops/{name}" for name in _checks.OPS), "--dtype", dtype, "--json")
    assert [i["detail"] for i in result.json["items"] if i["status"] != "ok"] == []
    assert {i["detail"] for i in result.json["items"]} == {"ran on torch"}
    assert result.code == 0


def test_kda_as_op_and_model(fla_cli):
    result = fla_cli("smoke", "--only", "kda", "--json")
    items = {i["item"]: i for i in result.json["items"]}
    assert items["ops/kda"]["steps"] == ["forward", "backward"]
    assert items["models/kda"]["steps"] == ["construct", "config", "forward", "backward", "generate"]
    assert result.code == 0


def test_every_family_is_built_trained_and_generates(fla_cli):
    result = fla_cli("smoke", "--only", *(f"models/{f.model_type}" for f in FAMILIES), "--json")
    steps = ["construct", "config", "forward", "backward", "generate"]
    assert [(i["detail"], i["status"]) for i in result.json["items"] if i["steps"] != steps] == []
    assert result.code == 0


def test_text_output_has_one_row_per_item(fla_cli):
    out = fla_cli("smoke", "--only", "ops/retention").out
    assert "ops/retention  ok" in out
    assert "1 of 1 items are fine on cpu in float32." in out


def test_a_wrong_result_fails_with_its_reason_and_exit_code_1(fla_cli, monkeypatch):
    monkeypatch.setitem(_checks._TOLERANCE, "float32", (0.0, 0.0))
    result = fla_cli("smoke", "--only", "ops/gla", "--json")
    assert result.code == 1
    item = result.json["items"][0]
    assert item["status"] == "fail"
    assert item["detail"].startswith("forward: o is off by an RMS ratio of")


def test_an_unknown_item_is_named(fla_cli):
    result = fla_cli("smoke", "--only", "kdda")
    assert (result.code, result.out) == (1, "")
    assert "no item is called kdda" in result.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_an_absent_device_exits_with_3(fla_cli):
    result = fla_cli("smoke", "--device", "cuda")
    assert result.code == 3
    assert result.err.startswith("fla smoke: --device cuda cannot be used")


def test_steps_stop_at_the_first_failure_and_keep_its_first_line():
    def wrong() -> None:
        raise ValueError("bad\nworse")

    result = run_steps("x", iter([("one", lambda: "fine"), ("two", wrong), ("three", lambda: None)]))
    assert (result.status, result.steps, result.detail) == ("fail", ["one"], "two: ValueError: bad")


def test_a_step_may_skip_its_item():
    def skip() -> None:
        raise Skip("no such hardware")

    assert run_steps("x", iter([("one", skip)])).status == "skip"


def test_a_mismatch_needs_no_exception_name():
    def wrong() -> None:
        raise Mismatch("o is off")

    assert run_steps("x", iter([("one", wrong)])).detail == "one: o is off"
