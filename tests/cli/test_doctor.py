# SPDX-License-Identifier: MIT
from __future__ import annotations

import pytest

from fla.backends import devices
from fla.cli import _devices, _installed


@pytest.fixture
def no_conflicts(monkeypatch):
    """The environment of whoever runs the tests is not under test."""
    monkeypatch.setattr(_installed, "conflicts", lambda installed, copies: [])
    for name in list(__import__("os").environ):
        if name.startswith("FLA_"):
            monkeypatch.delenv(name)


def test_a_sound_install_exits_with_0(fla_cli, no_conflicts):
    result = fla_cli("doctor", "--strict", "--json")
    assert result.code == 0, result.json["problems"] + result.json["warnings"]
    report = result.json
    assert report["ok"] is True
    assert all(room["error"] is None for room in report["fla"]["rooms"])
    names = {row["name"]: row["version"] for row in report["distributions"]}
    assert names["torch"] == report["torch"]["version"] or names["torch"] in report["torch"]["version"]


def test_the_cpu_runs_pytorch_and_it_is_said_that_kernels_do_not(fla_cli, no_conflicts):
    cpu = fla_cli("doctor", "--json").json["devices"][-1]
    assert (cpu["type"], cpu["runs"]) == ("cpu", "torch")
    assert "kernels do not run" in cpu["why"]


def test_text_has_every_section(fla_cli, no_conflicts):
    out = fla_cli("doctor").out
    for section in ("Python", "fla", "Distributions", "Devices", "Backends"):
        assert f"\n{section}" in out
    assert "nvcc:" in out


def test_an_absent_device_exits_with_3(fla_cli, no_conflicts, monkeypatch):
    monkeypatch.setattr(_devices, "devices", lambda: [{"platform": "cpu", "type": "cpu", "index": None, "name": "x"}])
    result = fla_cli("doctor", "--require", "cuda", "--json")
    assert result.code == 3
    assert "no cuda device was found" in result.json["problems"]
    assert fla_cli("doctor", "--require", "cpu").code == 0


def test_rocm_is_not_cuda(fla_cli, no_conflicts, monkeypatch):
    gpu = {"platform": "rocm", "type": "cuda", "index": 0, "name": "x"}
    monkeypatch.setattr(_devices, "devices", lambda: [gpu])
    monkeypatch.setattr(_devices, "triton_facts", lambda: {"version": "3.6.0", "driver": "hip gfx942", "error": None})
    monkeypatch.setattr(devices, "has_triton_driver", lambda device_type: True)
    assert fla_cli("doctor", "--require", "cuda").code == 3
    result = fla_cli("doctor", "--require", "rocm", "--json")
    assert result.code == 0
    assert result.json["devices"][0]["runs"] == "triton"


def test_a_gpu_without_a_triton_driver_runs_pytorch_and_says_why(fla_cli, no_conflicts, monkeypatch):
    gpu = {"platform": "cuda", "type": "cuda", "index": 0, "name": "x", "capability": "9.0"}
    monkeypatch.setattr(_devices, "devices", lambda: [gpu])
    monkeypatch.setattr(_devices, "triton_facts", lambda: {"version": "3.6.0", "driver": None, "error": "0 drivers"})
    device = fla_cli("doctor", "--json").json["devices"][0]
    assert device["runs"] == "torch"
    assert "0 drivers" in device["why"]


def test_a_required_backend_that_nothing_registers_exits_with_1(fla_cli, no_conflicts):
    result = fla_cli("doctor", "--require-backend", "no_such_backend", "--json")
    assert result.code == 1
    assert result.json["problems"] == ["backend no_such_backend cannot be used: nothing registers it"]
    assert fla_cli("doctor", "--require-backend", "torch").code == 0


def test_warnings_fail_under_strict_only(fla_cli, no_conflicts, monkeypatch):
    monkeypatch.setenv("FLA_PLUGIN", "a")
    assert fla_cli("doctor").code == 0
    result = fla_cli("doctor", "--strict", "--json")
    assert result.code == 1
    assert any("did you mean FLA_PLUGINS?" in text for text in result.json["warnings"])


def test_settings_that_are_set_are_shown_and_all_of_them_on_demand(fla_cli, no_conflicts, monkeypatch):
    monkeypatch.setenv("FLA_CHECK_INPUTS", "1")
    assert [s["name"] for s in fla_cli("doctor", "--json").json["settings"]] == ["FLA_CHECK_INPUTS"]
    assert len(fla_cli("doctor", "--show-env-vars", "--json").json["settings"]) > 5


def test_a_second_copy_is_a_warning_that_names_it(fla_cli, monkeypatch):
    copy = {"distribution": "fla-core", "version": "0.6.0", "location": "/elsewhere"}
    monkeypatch.setattr(_installed, "other_copies", lambda installed, ours: [copy])
    report = fla_cli("doctor", "--json").json
    assert report["other_copies"] == [copy]
    assert any("fla-core 0.6.0 in /elsewhere also provides `fla`" in text for text in report["warnings"])


def test_without_torch_it_reports_that_and_exits_with_1(fresh_fla):
    result = fresh_fla("doctor", "--json", without=("torch",))
    assert result.code == 1
    assert "torch cannot be imported" in result.json["problems"][0]
    assert "Traceback" not in result.err


def test_without_triton_everything_is_sound(fresh_fla):
    result = fresh_fla("doctor", "--json", without=("triton",))
    assert result.code == 0, result.err
    assert result.json["triton"]["version"] is None
