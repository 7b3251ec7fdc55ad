# SPDX-License-Identifier: MIT
"""Running the command line: in this process for speed, in a fresh one where the process matters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from fla.cli import main


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Fla = Callable[..., Result]


@pytest.fixture
def fla_cli(capsys: pytest.CaptureFixture[str]) -> Fla:
    """Run `fla` in this process: `fla_cli("ops", "--json")`."""

    def call(*words: str) -> Result:
        capsys.readouterr()
        try:
            code = main(words)
        except SystemExit as stop:  # argparse: --help, --version and usage errors
            code = stop.code if isinstance(stop.code, int) else 1
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture
def fresh_fla() -> Fla:
    """Run `fla` in a new process, with some modules made unimportable: `fresh_fla("ops", without=("torch",))`."""

    def call(*words: str, without: tuple[str, ...] = (), env: dict[str, str] | None = None) -> Result:
        code = (
            "import sys\n"
            f"sys.modules.update(dict.fromkeys({without!r}))\n"
            "from fla.cli import main\n"
            f"sys.exit(main({list(words)!r}))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **(env or {})}, timeout=120
        )
        return Result(done.returncode, done.stdout, done.stderr)

    return call
