# SPDX-License-Identifier: MIT
"""What ran in a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fla.backends import Trace, trace


class Ran:
    """The dispatched calls of a test so far. Called with a backend's name it asserts that the backend ran."""

    def __init__(self, calls: Trace) -> None:
        self.calls = calls

    def __call__(self, backend: str, function: str | None = None, *, times: int | None = None) -> None:
        """Assert that a backend executed an op.

        Args:
            backend: its ``backend_type``; ``triton`` or ``torch`` for core.
            function: only calls of this function, such as ``chunk_kda``, count.
            times: exactly so many calls; None for at least one.

        Raises:
            AssertionError: it did not; the message says what ran instead, and why the backend did not.
        """
        __tracebackhide__ = True
        count = self.calls.ran(backend, function)
        if count == times or (times is None and count):
            return
        what = f"{backend} served {count} calls{f' of {function}' if function else ''}"
        wanted = "at least one" if times is None else str(times)
        raise AssertionError(f"{what}, {wanted} expected; {self._what_ran(backend)}")

    def core_only(self, function: str | None = None) -> None:
        """Assert that ops ran and that core executed all of them.

        Raises:
            AssertionError: a backend served a call, or no op was called.
        """
        __tracebackhide__ = True
        calls = [c for c in self.calls if function in (None, c.function)]
        others = [c for c in calls if c.decision is not None and not c.decision.core]
        if others or not any(c.decision is not None for c in calls):
            raise AssertionError(f"core alone was expected to run; {self._what_ran(None)}")

    def _what_ran(self, backend: str | None) -> str:
        lines = []
        for (operation, function, ran), count in sorted(self.calls.counts().items(), key=str):
            lines.append(f"  {operation}.{function} -> {ran or 'raised'}, {count} calls")
        for call in self.calls:
            for verdict in call.decision.rejections if call.decision is not None else ():
                line = f"  {call.function}: {verdict}"
                if verdict.backend == backend and line not in lines:
                    lines.append(line)
        return "what ran:\n" + "\n".join(lines) if lines else "no dispatched op was called"


@contextmanager
def recording() -> Iterator[Ran]:
    """Write down what runs in the block, in this thread."""
    with trace() as calls:
        yield Ran(calls)
