# SPDX-License-Identifier: MIT
"""Processes of table.py, one for each library: what they print is read as it comes, and none is waited for in vain."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


class Child:
    """A process that imports a library, says READY, waits for a line, and prints FOUND lines."""

    def __init__(self, library: str, folder: str | None, names: list[str], compile_only: bool, cache: str) -> None:
        root = HERE.parents[1]
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        rest = [p for p in given if p and Path(p).resolve() != root]
        path = [str(root) if folder is None else folder, str(HERE), *rest]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}
        if folder and cache:
            env["TRITON_CACHE_DIR"] = cache
        self.library, self.names = library, names
        self.found: list[dict[str, Any]] = []
        self.ready, self.over = threading.Event(), threading.Event()
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (lives as long as the process)
        command = [sys.executable, str(HERE / "table.py"), "--child", library]
        self._process = subprocess.Popen(
            [*command, *(["--compile"] if compile_only else []), *names], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self._errors, text=True, env=env, cwd="/", start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("READY"):
                self.ready.set()
            elif line.startswith("FOUND "):
                self.found.append(json.loads(line[6:]))
        self._process.wait()
        self.ready.set()
        self.over.set()

    def go(self) -> None:
        """Let it begin; a process that has ended is none to begin."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.write("go\n")
            self._process.stdin.flush()

    def finish(self, deadline: float) -> list[dict[str, Any]]:
        """What it found by ``deadline`` (of `time.perf_counter`); then it is stopped, and what it started with it."""
        if not self.over.wait(max(0.0, deadline - time.perf_counter())):
            print(f"{self.library}: stopped, {len(self.found)} of {len(self.names)} cases done", flush=True)
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.over.wait(2)
        if self._process.returncode not in (0, -signal.SIGKILL):
            self._errors.seek(0)
            print(f"{self.library}: exit {self._process.returncode}: {self._errors.read()[-600:]}", flush=True)
        return list(self.found)
