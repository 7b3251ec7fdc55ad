# SPDX-License-Identifier: MIT
from __future__ import annotations

import subprocess
import sys

import pytest

import fla
from fla.cli._app import COMMANDS


def test_help_names_every_command(fla_cli):
    result = fla_cli("--help")
    assert result.code == 0
    assert all(name in result.out for name in COMMANDS)


def test_no_command_prints_the_help(fla_cli):
    result = fla_cli()
    assert result.code == 0
    assert "usage: fla" in result.out


def test_version(fla_cli):
    assert fla_cli("--version").out == f"fla {fla.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_json(fla_cli, command):
    result = fla_cli(command, "--help")
    assert result.code == 0
    if command != "backends":  # its sub-commands have the option
        assert "--json" in result.out


@pytest.mark.parametrize("words", [("ops", "--filter", "a["), ("ops", "--static", "--filter", "(")])
def test_a_bad_expression_exits_with_2(fla_cli, words):
    result = fla_cli(*words)
    assert (result.code, result.out) == (2, "")
    assert "is not a regular expression" in result.err


def test_unknown_command_is_a_usage_error(fla_cli):
    result = fla_cli("trian")
    assert result.code == 2
    assert "invalid choice: 'trian'" in result.err


def test_python_dash_m_is_the_same_command_line():
    done = subprocess.run([sys.executable, "-m", "fla", "--version"], capture_output=True, text=True)
    assert done.stdout == f"fla {fla.__version__}\n"


@pytest.mark.parametrize("command", [*COMMANDS, None])
def test_help_works_without_torch_and_imports_nothing_heavy(fresh_fla, command):
    heavy = ("torch", "triton", "transformers", "numpy", "rich", "matplotlib")
    result = fresh_fla(*([command] if command else []), "--help", without=heavy)
    assert result.code == 0, result.err
    assert "usage: fla" in result.out


@pytest.mark.parametrize("words", [("demo",), ("smoke",), ("backends", "explain", "kda.chunk_kda", "--shape", "T4")])
def test_missing_torch_is_one_line_that_says_what_to_install(fresh_fla, words):
    result = fresh_fla(*words, without=("torch",))
    assert result.code == 1
    assert result.err.count("\n") == 1
    assert "torch is not installed" in result.err
    assert "flash-linear-attention[cpu]" in result.err


def test_pipe_that_closes_early_is_no_traceback():
    command = f"{sys.executable} -m fla settings --json | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert "Traceback" not in done.stderr
