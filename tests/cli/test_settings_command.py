# SPDX-License-Identifier: MIT
from __future__ import annotations

from fla import settings


def test_table_lists_every_setting(fla_cli):
    result = fla_cli("settings")
    assert result.code == 0
    assert all(name in result.out for name in settings.names())


def test_json_tells_value_default_and_origin(fla_cli, monkeypatch):
    monkeypatch.setenv("FLA_CHECK_INPUTS", "yes")
    rows = {row["name"]: row for row in fla_cli("settings", "--json").json["settings"]}
    row = rows["FLA_CHECK_INPUTS"]
    assert (row["value"], row["default"], row["origin"]) == (True, False, "environment")
    assert rows["FLA_BACKEND_STRICT"]["origin"] == "default"


def test_unknown_variable_is_named_with_the_nearest_match(fla_cli, monkeypatch):
    monkeypatch.setenv("FLA_PLUGIN", "a")
    assert "did you mean FLA_PLUGINS?" in fla_cli("settings").out
    assert "FLA_PLUGIN" in fla_cli("settings", "--json").json["unknown"]


def test_one_setting_is_explained(fla_cli):
    result = fla_cli("settings", "fla_plugins")
    assert "FLA_PLUGINS" in result.out
    assert "FLA_BACKEND_STRICT" not in result.out


def test_a_name_that_is_no_setting_fails_with_one_line(fla_cli):
    result = fla_cli("settings", "FLA_PLUGIN")
    assert (result.code, result.out) == (1, "")
    assert "did you mean FLA_PLUGINS?" in result.err
