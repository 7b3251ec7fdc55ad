# SPDX-License-Identifier: MIT
"""The pytest plugin: options, the fixtures ``assert_ran`` and ``assert_core_ran``, the tally at the end.

pytest loads this module in every project where fla is installed, so it imports nothing but pytest until it is used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fla.testing.ran import Ran

PROPERTY = "fla_case"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fla", "conformance of fla backends (--pyargs fla.testing.conformance)")
    group.addoption(
        "--fla-backend",
        action="append",
        default=[],
        metavar="NAME",
        help="backend_type to test; 'triton' and 'torch' are core's own paths. May be repeated.",
    )
    group.addoption(
        "--fla-device", metavar="DEVICE", help="torch device to test on; chosen by the backend if not given."
    )
    group.addoption(
        "--fla-op",
        action="append",
        default=[],
        metavar="OP",
        help="operation or function to test (kda, chunk_kda). May be repeated; all if not given.",
    )
    group.addoption(
        "--fla-require",
        action="store_true",
        help="fail instead of skipping where a backend cannot be used on this machine.",
    )
    group.addoption("--fla-report", metavar="FILE", help="write every case and its outcome to FILE as JSON.")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Tally(config), "fla-tally")


class _Tally:
    """Outcomes of the kit's cases. Under xdist they arrive with the workers' reports."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.cases: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call":
            return
        found = [value for name, value in report.user_properties if name == PROPERTY]
        for value in found:
            self.cases.append({**json.loads(str(value)), "seconds": round(report.duration, 4)})

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.cases:
            from fla.testing.report import summary

            terminalreporter.section("fla conformance")
            for line in summary(self.cases, verbose=self.config.get_verbosity() > 0):
                terminalreporter.write_line(line)

    def pytest_sessionfinish(self) -> None:
        path = self.config.getoption("--fla-report")
        if path and not hasattr(self.config, "workerinput"):
            from fla.testing.report import write

            write(path, self.cases)


@pytest.fixture
def assert_ran() -> Iterator[Ran]:
    """``assert_ran("my_kda")`` at the end of a test: fails unless that backend executed an op in it.

    ``assert_ran("my_kda", "chunk_kda", times=2)`` also names the function and how often.
    """
    from fla.testing.ran import recording

    with recording() as ran:
        yield ran


@pytest.fixture
def assert_core_ran(assert_ran: Ran) -> Any:
    """``assert_core_ran()`` at the end of a test: fails if a backend executed an op in it, or nothing did."""
    return assert_ran.core_only
