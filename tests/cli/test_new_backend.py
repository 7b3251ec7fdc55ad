# SPDX-License-Identifier: MIT
from __future__ import annotations

import ast
import re

import pytest

from fla.cli.new_backend import Names, render


def test_it_writes_a_package_and_says_what_to_do(fla_cli, tmp_path):
    folder = tmp_path / "mine"
    result = fla_cli("new-backend", "my-kda", "--op", "kda.chunk_kda", "--dir", str(folder))
    assert result.code == 0, result.err
    assert "pip install -e" in result.out
    files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert files == {
        ".github/workflows/tests.yml",
        ".gitignore",
        "LICENSE",
        "README.md",
        "pyproject.toml",
        "src/fla_backend_my_kda/__init__.py",
        "src/fla_backend_my_kda/kernel.py",
        "src/fla_backend_my_kda/plugin.py",
        "src/fla_backend_my_kda/py.typed",
        "tests/test_backend.py",
    }
    project = (folder / "pyproject.toml").read_text()
    assert 'name = "fla-backend-my-kda"' in project
    assert 'my_kda = "fla_backend_my_kda.plugin"' in project


def test_the_folder_is_named_after_the_distribution(fla_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = fla_cli("new-backend", "fast_gla", "--op", "chunk_gla", "--json").json
    assert found["folder"] == found["distribution"] == "fla-backend-fast-gla"
    assert all((tmp_path / found["folder"] / name).exists() for name in found["files"])


def test_nothing_is_overwritten(fla_cli, tmp_path):
    (tmp_path / "README.md").write_text("mine")
    result = fla_cli("new-backend", "x", "--op", "gla.chunk_gla", "--dir", str(tmp_path))
    assert result.code == 1
    assert "is not an empty folder; nothing was written" in result.err
    assert [p.name for p in tmp_path.iterdir()] == ["README.md"]
    assert (tmp_path / "README.md").read_text() == "mine"


def test_an_empty_folder_will_do(fla_cli, tmp_path):
    assert fla_cli("new-backend", "x", "--op", "gla.chunk_gla", "--dir", str(tmp_path)).code == 0


@pytest.mark.parametrize("name", ["Fast", "1st", "a b", "a__b", "-a", "a/b", "../a", "", "é"])
def test_senseless_names_are_refused(fla_cli, tmp_path, name):
    result = fla_cli("new-backend", "--op", "gla.chunk_gla", "--dir", str(tmp_path / "x"), "--", name)
    assert (result.code, result.out) == (2, "")
    assert "no name for a backend" in result.err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", ["triton", "torch", "class", "import"])
def test_taken_names_are_refused(fla_cli, tmp_path, name):
    result = fla_cli("new-backend", name, "--op", "gla.chunk_gla", "--dir", str(tmp_path / "x"))
    assert result.code == 2
    assert f"cannot be called '{name}'" in result.err


def test_the_variable_of_something_else_is_refused(fla_cli, tmp_path):
    result = fla_cli("new-backend", "plugins", "--op", "gla.chunk_gla", "--dir", str(tmp_path / "x"))
    assert result.code == 2
    assert "FLA_PLUGINS is a setting already" in result.err


@pytest.mark.parametrize("op", ["chunk_nothing", "gla.chunk_nothing", "nothing.chunk_gla"])
def test_unknown_ops_are_refused(fla_cli, tmp_path, op):
    result = fla_cli("new-backend", "x", "--op", op, "--dir", str(tmp_path / "x"))
    assert result.code == 1
    assert not (tmp_path / "x").exists()


def test_every_op_of_core_gets_a_package_that_fits_its_signature():
    """Compiled, registered against the op and dropped again: a wrong parameter is an error at registration."""
    from fla.backends import BackendRegistry, register
    from fla.backends.registry import REGISTRY
    from fla.cli.backends import _import_ops

    _import_ops()
    ops = [op for op in REGISTRY.ops() if op.fn.__module__.startswith("fla.ops.")]
    assert len(ops) > 15
    for number, op in enumerate(ops):
        names = Names.of(f"fits{number}")
        files = render(names, f"{op.fn.__module__.removeprefix('fla.ops.')}.{op.name}")
        for name, text in files.items():
            assert re.search("@[A-Z_]+@", name + text) is None, name
            if name.endswith(".py"):
                ast.parse(text)
                assert max(map(len, text.splitlines()), default=0) <= 120, f"{op}: {name}"
        scope: dict = {"__name__": "fits"}
        exec(compile(files[f"src/{names.package}/plugin.py"].replace("@hookimpl", ""), "plugin.py", "exec"), scope)
        register(op.operation, scope[names.class_name]())
        try:
            row = next(r for r in REGISTRY.of(op.key) if r.name == names.type)
            assert row.backend.get_implementation(op.name) is not None
        finally:
            BackendRegistry(op.operation).unregister(names.type)
