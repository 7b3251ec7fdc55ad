# SPDX-License-Identifier: MIT
"""Packages installed into a folder of their own, for tests in processes of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture
def installed(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """`installed(folder, ...)` installs projects with pip and returns an environment in which they are seen."""

    def install(*projects: Path) -> dict[str, str]:
        site = tmp_path / "site"
        for project in projects:
            # Building in the tree would leave build folders in it.
            copy = tmp_path / "source" / project.name
            shutil.copytree(
                project, copy, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__", ".*cache")
            )
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
            command += ["--no-build-isolation", "--target", str(site), str(copy)]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("FLA_", "PYTEST_"))}
        return {**kept, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]), "OMP_NUM_THREADS": "1"}

    return install


@pytest.fixture
def run_tests() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run pytest in a folder, in a process of its own."""

    def run(folder: Path, env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *words]
        return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)

    return run
