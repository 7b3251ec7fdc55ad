# SPDX-License-Identifier: MIT
"""The kit as a test class."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from fla.testing.cases import Case, cases
from fla.testing.plugin import PROPERTY
from fla.testing.report import row
from fla.testing.target import NotRegistered, Unavailable, targets

Runner = Callable[[], dict[str, Any]]


class BackendConformance:
    """Every case of the kit for one backend, as a class to derive from::

        class TestMine(BackendConformance):
            backend_type = "mine"

    The backend is an installed plugin, or one that was registered before the tests are collected (at the top of the
    test module, say). Command line options win over the attributes.

    Attributes:
        backend_type: what is tested; ``triton`` and ``torch`` are core's own paths.
        device: torch device; None for one that the backend is for.
        ops: operations or functions to test; empty for all that it takes over.
        arguments: function name -> arguments that every call is given. The backend itself can say the same in an
            attribute ``testing_arguments``.
        require: fail where the backend cannot be used on this machine, instead of skipping.
    """

    backend_type: str = ""
    device: str | None = None
    ops: tuple[str, ...] = ()
    arguments: Mapping[str, Mapping[str, Any]] = {}
    require: bool = False

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "fla_case" not in metafunc.fixturenames:
            return
        config = metafunc.config
        names = [self.backend_type] if self.backend_type else config.getoption("--fla-backend")
        found: list[Any] = []
        for name in names:
            found += self._parameters(name, config)
        if not names:
            found = [pytest.param(_failing("no backend is named: give --fla-backend NAME"), id="no_backend")]
        metafunc.parametrize("fla_case", found)

    def _parameters(self, name: str, config: pytest.Config) -> list[Any]:
        device = config.getoption("--fla-device") or self.device
        ops = tuple(config.getoption("--fla-op")) or self.ops
        try:
            found, unknown = targets(name, device=device, ops=ops, fixed=self.arguments)
        except NotRegistered as error:
            return [pytest.param(_failing(str(error)), id=f"{name}-registered")]
        if not found:
            text = f"{name} takes over no function that the kit tests{f' among {list(ops)}' if ops else ''}"
            return [pytest.param(_failing(text), id=f"{name}-registered")]
        parameters = [pytest.param(case, id=case.id) for target in found for case in cases(target)]
        for function in unknown:
            skip = pytest.mark.skip(reason=f"the kit has no row for {function}")
            parameters.append(pytest.param(_failing(function), id=f"{name}-{function}-no_row", marks=skip))
        return parameters

    def test_case(self, fla_case: Any, request: pytest.FixtureRequest) -> None:
        """One case: it runs in the backend and is right, or is refused as the backend declares."""
        if not isinstance(fla_case, Case):
            fla_case()
            return
        require = self.require or request.config.getoption("--fla-require")
        outcome, reason, calls = "failed", "", 0
        try:
            result = fla_case.run()
            outcome, reason, calls = result.kind, result.reason, result.calls
        except Unavailable as error:
            reason = str(error)
            if require:
                pytest.fail(f"{fla_case.target} cannot be used here: {reason}", pytrace=False)
            outcome = "skipped"
            pytest.skip(f"{fla_case.target} cannot be used here: {reason}")
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise
        finally:
            target = fla_case.target
            stated = target.stated_tolerances
            entry = row(target.backend, str(target.spec), fla_case.name, target.device, outcome, reason, calls, stated)
            request.node.user_properties.append((PROPERTY, json.dumps(entry)))


def _failing(text: str) -> Callable[[], None]:
    def fail() -> None:
        pytest.fail(text, pytrace=False)

    return fail
