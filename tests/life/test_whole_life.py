# SPDX-License-Identifier: MIT
"""A user's whole life with plugins: wheels are built, installed into a fresh environment, switched off, removed.

Everything of this project comes from the wheels built here and nothing from an index. torch and the other dependencies
are those of the outer environment, lent by a folder of links that leaves out `fla` in every form: the environment under
test sees neither an editable installation nor its metadata.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import venv
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
# Plugin -> its variable, its backend, an operation of it, and why it stays out on a machine without its hardware.
PLUGINS = {
    "flashkda": ("FLA_FLASH_KDA", "flash_kda", "kda", "module flash_kda is not installed"),
    "tilelang": ("FLA_TILELANG", "tilelang", "gated_delta_rule", "module tilelang is not installed"),
    "ascend": ("FLA_ASCEND", "triton_ascend", "gla", "module torch_npu is not installed"),
}
pytestmark = pytest.mark.slow

BROKEN_PROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "fla-backend-broken"
version = "1.0"

[project.entry-points."fla.backends"]
broken = "fla_backend_broken"

[tool.setuptools]
py-modules = ["fla_backend_broken"]
"""

# What the op answers and who answered it.
CALL = """
import json, os, sys, warnings
import torch
from fla.backends import last_decision, list_backends, list_plugins
from fla.ops.retention import chunk_retention

torch.manual_seed(0)
x = torch.randn(1, 40, 2, 16)

def ran(**variables):
    os.environ.update(variables)
    try:
        o, _ = chunk_retention(x, x, x)
    finally:
        for name in variables:
            del os.environ[name]
    assert abs(o.double().sum().item() - EXPECTED) < 1e-3 if EXPECTED is not None else True
    return last_decision().backend
"""


def pip(*words: str, python: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", *(("--python", str(python)) if python else ()), *words]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON"))}
    done = subprocess.run(command, capture_output=True, text=True, env={**env, "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    assert done.returncode == 0, f"pip {' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheels of core, the plugins, the example, and of a plugin that is broken."""
    work = tmp_path_factory.mktemp("build")
    core = work / "core"
    core.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, core)
    skip = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    shutil.copytree(ROOT / "fla", core / "fla", ignore=skip)
    for name in PLUGINS:
        shutil.copytree(ROOT / "plugins" / f"fla-backend-{name}", work / name, ignore=skip)
    shutil.copytree(ROOT / "examples" / "third_party_backend", work / "example", ignore=skip)
    (work / "broken").mkdir()
    (work / "broken" / "pyproject.toml").write_text(BROKEN_PROJECT)
    (work / "broken" / "fla_backend_broken.py").write_text("raise SystemExit('cannot live without CUDA 14')\n")
    house = work / "wheels"
    words = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(house))
    pip("wheel", *words, *(str(work / name) for name in ("core", *PLUGINS, "example", "broken")))
    return house


def test_wheels_are_typed_and_licensed(wheels: Path) -> None:
    packages = {"flash_linear_attention": "fla", **{f"fla_backend_{name}": f"fla_backend_{name}" for name in PLUGINS}}
    for distribution, package in packages.items():
        (wheel,) = wheels.glob(f"{distribution}-*.whl")
        names = zipfile.ZipFile(wheel).namelist()
        assert f"{package}/py.typed" in names
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
        strays = [name for name in names if not name.startswith((f"{package}/", f"{distribution}-"))]
        assert not strays, strays


class Home:
    """A fresh virtual environment without `fla`."""

    def __init__(self, folder: Path, wheels: Path) -> None:
        self.folder, self.wheels = folder, wheels
        venv.create(folder, with_pip=False, symlinks=True)
        scheme = sysconfig.get_preferred_scheme("prefix")
        paths = sysconfig.get_paths(scheme, vars={"base": str(folder), "platbase": str(folder)})
        self.site, self.bin = Path(paths["purelib"]), Path(paths["scripts"])
        self.python = self.bin / "python"
        lent = folder / "lent"
        lent.mkdir()
        ours = ("fla", "fla_", "flash_linear_attention", "flash_kda", "__editable__", "pip", "_pytest", "pytest")
        ours += ("tilelang", "torch_npu")
        for place in {Path(torch.__file__).parents[1], Path(pytest.__file__).parents[1]}:
            for entry in place.iterdir():
                mine = entry.name == "fla" or entry.name.startswith(ours[1:])
                if not mine and entry.suffix != ".pth" and not (lent / entry.name).exists():
                    (lent / entry.name).symlink_to(entry)
        (self.site / "lent.pth").write_text(f"{lent}\n")

    def install(self, *names: str, deps: bool = True) -> None:
        words = ["--quiet", "--no-index", "--find-links", str(self.wheels), *(() if deps else ("--no-deps",)), "--pre"]
        pip("install", *words, *names, python=self.python)

    def uninstall(self, *names: str) -> None:
        pip("uninstall", "--quiet", "--yes", *names, python=self.python)

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("FLA_", "PYTHON"))}
        env = {**kept, "OMP_NUM_THREADS": "1", **variables}
        return subprocess.run(command, capture_output=True, text=True, env=env, cwd=self.folder)

    def script(self, text: str, expected: float | None = None, **variables: str) -> dict:
        """Run `text` after CALL; what it left in `found`, and the warnings on standard error."""
        source = f"EXPECTED = {expected!r}\n{CALL}\n{textwrap.dedent(text)}\nprint('FOUND', json.dumps(found))"
        done = self.run(str(self.python), "-c", source, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        line = next(line for line in done.stdout.splitlines() if line.startswith("FOUND "))
        return {**json.loads(line.removeprefix("FOUND ")), "stderr": done.stderr}


def test_a_whole_life(wheels: Path, tmp_path: Path) -> None:
    home = Home(tmp_path / "home", wheels)
    assert home.run(str(home.python), "-c", "import fla").returncode != 0, "the outer fla leaks in"

    # Core alone.
    home.install("flash-linear-attention")
    alone = home.script(
        """
        import fla
        found = {"file": fla.__file__, "ran": ran(), "plugins": list_plugins()}
        found["sum"] = chunk_retention(x, x, x)[0].double().sum().item()
        """
    )
    assert Path(alone["file"]).is_relative_to(home.site)
    assert alone["ran"] == "torch"
    assert alone["plugins"] == []
    right = alone["sum"]
    made = home.run(str(home.bin / "fla"), "new-backend", "mine", "--op", "retention.chunk_retention")
    assert made.returncode == 0, made.stderr
    assert (home.folder / "fla-backend-mine" / "src" / "fla_backend_mine" / "kernel.py").exists()

    # All plugins. The example takes its op over; the others have no kernels or no hardware here, are listed and say so.
    # The wheels of kernels and tilelang, dependencies on some machines, are on no index here.
    home.install("fla-backend-short-retention", "fla-backend-ascend")
    home.install("fla-backend-flashkda", "fla-backend-tilelang", deps=False)
    taken = home.script(
        """
        found = {
            "ran": ran(),
            "variable": [ran(FLA_SHORT_RETENTION=v) for v in ("0", "off", "1")],
            "plugins": [ran(FLA_PLUGINS=v) for v in ("-short-retention", "flashkda", "short_retention,flashkda")],
            "dispatch": ran(FLA_DISABLE_BACKEND_DISPATCH="1"),
            "again": ran(),
            "listed": {p["name"]: p for p in list_plugins()},
        }
        import fla.ops.gated_delta_rule, fla.ops.gla, fla.ops.kda

        def standing():
            return [[r["operation"], r["backend"], r["distribution"], r["code"], r["reason"]] for r in list_backends()]

        found["standing"] = standing()
        os.environ.update(FLA_FLASH_KDA="0", FLA_TILELANG="off", FLA_ASCEND="no")
        found["off"] = standing()
        os.environ.update(FLA_FLASH_KDA="1", FLA_TILELANG="1", FLA_ASCEND="1")
        os.environ["FLA_PLUGINS"] = "-flashkda,-tilelang,-ascend"
        found["asked_for"] = standing()
        for name in ("FLA_FLASH_KDA", "FLA_TILELANG", "FLA_ASCEND"):
            del os.environ[name]
        found["kept_out"] = standing()
        """,
        right,
    )
    assert taken["ran"] == "short_retention"
    assert taken["variable"] == ["torch", "torch", "short_retention"]
    assert taken["plugins"] == ["torch", "torch", "short_retention"]
    assert taken["dispatch"] == "torch"
    assert taken["again"] == "short_retention"
    names = {name: f"fla-backend-{name}" for name in PLUGINS} | {"short_retention": "fla-backend-short-retention"}
    assert {name: p["distribution"] for name, p in taken["listed"].items()} == names
    assert all(Path(p["file"]).is_relative_to(home.site) for p in taken["listed"].values())
    for name, (variable, backend, operation, missing) in PLUGINS.items():
        for state, code, text in (
            ("standing", "unavailable", missing),
            ("off", "disabled", f"{variable} is off"),
            ("asked_for", "unavailable", missing),
            ("kept_out", "disabled", "kept out by FLA_PLUGINS=-flashkda,-tilelang,-ascend"),
        ):
            rows = {tuple(row[:2]): row[2:] for row in taken[state]}
            distribution, found, reason = rows[operation, backend]
            assert (distribution, found) == (f"fla-backend-{name}", code), (state, rows)
            assert text in reason, (state, rows)

    # Kept out from the start it is not even imported.
    blocked = home.script(
        """
        ours = ("fla_backend_short_retention", "fla_backend_tilelang", "fla_backend_ascend")
        found = {"ran": ran(), "imported": [name for name in sys.modules if name.startswith(ours)]}
        found["states"] = {p["name"]: p["state"] for p in list_plugins()}
        """,
        right,
        FLA_PLUGINS="-short-retention,-tilelang,-fla_backend_ascend",
    )
    assert blocked["ran"] == "torch"
    assert not blocked["imported"]
    states = {name: "registered" if name == "flashkda" else "blocked" for name in names}
    assert blocked["states"] == states

    # A broken plugin beside it changes nothing but what is said.
    home.install("fla-backend-broken")
    beside = home.script("found = {'ran': ran(), 'listed': {p['name']: p for p in list_plugins()}}", right)
    assert beside["ran"] == "short_retention"
    assert beside["listed"]["broken"]["reason"] == "SystemExit: cannot live without CUDA 14"
    assert beside["stderr"].count("fla plugin broken of fla-backend-broken 1.0 is ignored") == 1
    shown = home.run(str(home.bin / "fla"), "backends", "list", "--json")
    assert shown.returncode == 0, shown.stderr
    listed = json.loads(shown.stdout)
    assert {p["name"]: p["ok"] for p in listed["plugins"]} == {"broken": False, **dict.fromkeys(names, True)}
    reasons = {row["backend"]: row["reason"] for row in listed["backends"]}
    for _, backend, _, missing in PLUGINS.values():
        assert missing in reasons[backend]

    # Without them core serves again, and without core there is nothing left.
    home.uninstall("fla-backend-broken", *names.values())
    after = home.script("found = {'ran': ran(), 'plugins': list_plugins()}", right)
    assert after["ran"] == "torch"
    assert after["plugins"] == []
    assert after["stderr"] == ""
    home.uninstall("flash-linear-attention")
    assert home.run(str(home.python), "-c", "import fla").returncode != 0
