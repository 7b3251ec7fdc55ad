# SPDX-License-Identifier: MIT
"""Run the cases of a check script side by side, in processes that take one after the other.

A fault of one kernel must not take other cases along: a process whose case failed ends, and another goes on. A script
answers ``script.py worker`` with `answer`.
"""

from __future__ import annotations

import json
import os
import queue
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

Result = dict[str, Any]


def answer(check: Callable[[str], Result]) -> None:
    """What a worker does: for each name on its input, print the result of that case, or under "fail" why there is none;
    then end, since the context of the GPU may be lost."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed must not be taken for an answer
    for name in sys.stdin:
        try:
            result = check(name.rstrip("\n"))
        except BaseException as error:
            result = {"fail": repr(error)[-300:]}
        print(json.dumps(result), file=answers, flush=True)
        if "torch" in sys.modules:
            # What this process keeps for its next case, all others lack.
            sys.modules["torch"].cuda.empty_cache()
        if "fail" in result:
            os._exit(1)


class _Worker:
    def __init__(self, script: str) -> None:
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the worker)
        self.process = subprocess.Popen(
            [sys.executable, script, "worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def ask(self, name: str, seconds: float) -> Result:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(name + "\n")
        self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            return {"fail": f"no answer in {seconds:.0f} s"}
        text = self.process.stdout.readline()
        if not text:
            code = self.process.wait()
            self.errors.seek(0)
            return {"fail": f"exit {code}: {self.errors.read()[-300:]}"}
        return dict(json.loads(text))

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.errors.close()


def run(
    script: str, names: Sequence[str], processes: int | None = None, seconds: float = 150
) -> Iterator[tuple[str, Result]]:
    """Names and results of the cases as they end; ``processes`` at a time, by default ``JOBS`` or one less than there
    are cores. A case that takes more than ``seconds`` fails."""
    left: queue.SimpleQueue[str] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[str, Result]] = queue.SimpleQueue()
    for name in names:
        left.put(name)

    def work() -> None:
        worker = None
        try:
            while True:
                name = left.get_nowait()
                try:
                    worker = worker or _Worker(script)
                    result = worker.ask(name, seconds)
                except (OSError, ValueError) as error:
                    result = {"fail": repr(error)}
                done.put((name, result))
                if "fail" in result and worker:
                    worker.close()
                    worker = None
        except queue.Empty:
            pass
        finally:
            if worker:
                worker.close()

    count = processes or int(os.environ.get("JOBS", 0)) or max(1, (os.cpu_count() or 2) - 1)
    with ThreadPoolExecutor(count) as pool:
        for _ in range(min(count, len(names))):
            pool.submit(work)
        for _ in names:
            yield done.get()
