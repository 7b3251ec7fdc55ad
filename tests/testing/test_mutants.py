# SPDX-License-Identifier: MIT
"""The kit catches every backend that is wrong on purpose, by the cases it should, and passes those that are right."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from fla.backends import BackendRegistry, BaseBackend, register
from fla.testing import cases, targets


def _load() -> ModuleType:
    if "fla_testing_mutants" not in sys.modules:
        spec = importlib.util.spec_from_file_location("fla_testing_mutants", Path(__file__).with_name("mutants.py"))
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules["fla_testing_mutants"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["fla_testing_mutants"]


mutants = _load()


@contextmanager
def registered(backend: BaseBackend) -> Iterator[None]:
    register("kda", backend)
    try:
        yield
    finally:
        BackendRegistry("kda").unregister(backend)


def run_kit(backend: BaseBackend, only: tuple[str, ...] = ()) -> tuple[dict[str, str], dict[str, str]]:
    """Outcomes by case, and what the failed ones say; of all cases, or of those named."""
    outcomes, failures = {}, {}
    with registered(backend):
        found, _ = targets(backend.backend_type, device="cpu")
        for case in itertools.chain.from_iterable(map(cases, found)):
            if only and case.name not in only:
                continue
            try:
                outcomes[case.name] = case.run().kind
            except Exception as error:
                outcomes[case.name] = "failed"
                failures[case.name] = f"{type(error).__name__}: {error}"
    return outcomes, failures


@pytest.mark.parametrize("backend", mutants.RIGHT, ids=lambda backend: backend.backend_type)
def test_kit_passes_a_backend_that_is_right(backend):
    outcomes, failures = run_kit(backend())
    assert failures == {}
    assert sum(kind == "ran" for kind in outcomes.values()) > 60


@pytest.mark.parametrize("backend", mutants.MUTANTS, ids=lambda backend: backend.backend_type)
def test_kit_catches_a_backend_that_is_wrong(backend):
    outcomes, failures = run_kit(backend(), backend.killers)
    assert outcomes == dict.fromkeys(backend.killers, "failed")
    assert backend.says in "\n".join(failures.values())


if __name__ == "__main__":  # which cases catch which mutant, for the docs and for whoever changes the kit
    for mutant in (*mutants.RIGHT, *mutants.MUTANTS):
        outcomes, failures = run_kit(mutant())
        groups: dict[str, int] = {}
        for name in failures:
            groups[name.split("-")[0]] = groups.get(name.split("-")[0], 0) + 1
        print(
            f"| {mutant.backend_type} | {len(failures)} of {len(outcomes)} | {', '.join(mutant.killers)} | {groups} |"
        )
