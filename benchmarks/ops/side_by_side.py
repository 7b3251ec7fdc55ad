# SPDX-License-Identifier: MIT
"""Run the cases of a check script side by side, each in a process of its own.

Most of a case is compilation, and a fault of one kernel must not take the other cases along. A script answers
``script.py worker NAME`` with the line that `answer` prints.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

Result = dict[str, Any]


def answer(check: Callable[[str], Result], name: str) -> None:
    """What a worker does: run a case and print its result, or under "fail" why there is none."""
    try:
        result = check(name)
    except BaseException as error:
        result = {"fail": repr(error)[-300:]}
    print("@" + json.dumps(result), flush=True)


def _one(script: str, name: str) -> Result:
    done = subprocess.run([sys.executable, script, "worker", name], capture_output=True, text=True)
    for text in reversed(done.stdout.splitlines()):
        if text.startswith("@"):
            return dict(json.loads(text[1:]))
    return {"fail": f"exit {done.returncode}: {done.stderr[-300:]}"}


def run(script: str, names: Sequence[str], processes: int | None = None) -> Iterator[tuple[str, Result]]:
    """Names and results of the cases as they end; ``processes`` at a time, by default one less than there are cores."""
    with ThreadPoolExecutor(processes or max(1, (os.cpu_count() or 2) - 1)) as pool:
        futures = {pool.submit(_one, script, name): name for name in names}
        for future in as_completed(futures):
            yield futures[future], future.result()
