# SPDX-License-Identifier: MIT
"""What ran: the last decision of a thread, and traces of a block."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from fla import settings

logger = logging.getLogger("fla.backends")


@dataclass(frozen=True)
class Verdict:
    """One candidate's standing for one call. ``code`` is ``accepted`` or a code of :class:`Rejection`."""

    backend: str
    code: str
    reason: str = ""
    priority: int | None = None
    distribution: str | None = None

    @property
    def accepted(self) -> bool:
        return self.code == "accepted"

    def __str__(self) -> str:
        return f"{self.backend}: {self.code}" + (f" ({self.reason})" if self.reason else "")


@dataclass(frozen=True)
class Decision:
    """What one call ran and why not something before it. ``core`` backends are called ``triton`` and ``torch``.

    ``rejections`` are in the order in which they were asked; a backend that failed and was replaced has code ``error``.
    """

    operation: str
    function: str
    backend: str
    core: bool
    rejections: tuple[Verdict, ...] = ()

    def __str__(self) -> str:
        return f"{self.operation}.{self.function} -> {self.backend}"


@dataclass
class Call:
    """One traced call. ``depth`` counts the dispatched calls around it; ``decision`` is None if the call raised."""

    operation: str
    function: str
    depth: int
    decision: Decision | None = None
    error: str | None = None

    @property
    def backend(self) -> str | None:
        return None if self.decision is None else self.decision.backend


@dataclass
class Trace:
    """Dispatched calls of a block in the order in which they began, nested ones included."""

    calls: list[Call] = field(default_factory=list)

    def __iter__(self) -> Iterator[Call]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def ran(self, backend: str, function: str | None = None) -> int:
        """How many calls a backend (``triton`` and ``torch`` for core) served."""
        return sum(call.backend == backend and function in (None, call.function) for call in self.calls)

    def counts(self) -> Counter[tuple[str, str, str | None]]:
        """Calls by ``(operation, function, backend)``."""
        return Counter((call.operation, call.function, call.backend) for call in self.calls)

    def to_dict(self) -> dict[str, Any]:
        return {"calls": [asdict(call) for call in self.calls]}


class _Thread(threading.local):
    # A Decision, or the parts of one: it is put together when somebody asks.
    decision: Any = None
    depth: int = 0


thread = _Thread()


def last_decision() -> Decision | None:
    """The decision of the dispatched call that finished last in this thread; None before the first one."""
    found = thread.decision
    if isinstance(found, tuple):
        op, entry, name, core, rejected = found
        found = thread.decision = Decision(op.operation, op.name, name, core, (*entry.refused, *rejected))
    return found


@contextmanager
def trace() -> Iterator[Trace]:
    """Write down every dispatched call of the block, in this thread or task; traces may be nested."""
    taken = Trace()
    context = settings.current_context()
    around = () if context is None else context.values.get("trace", ())
    with settings.push({"trace": (*around, taken)}):
        yield taken


logged: set[tuple[str, ...]] = set()
_LOGGED_AT_MOST = 4096


def log_once(*parts: str) -> None:
    """One log line per distinct text. A verifier that writes numbers into its reasons cannot fill the memory."""
    if parts not in logged and len(logged) < _LOGGED_AT_MOST:
        logged.add(parts)
        operation, function, backend, *reason = parts
        if reason:
            logger.info("[FLA Backend] %s.%s -> %s rejected: %s", operation, function, backend, reason[0])
        else:
            logger.info("[FLA Backend] %s.%s -> %s", operation, function, backend)
