# SPDX-License-Identifier: MIT
"""Hybrid models of every family train the same on two processes as on one: DDP and FSDP2, over gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed

from fla.models._index import FAMILIES

WORKER = Path(__file__).with_name("train_worker.py")

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="torch without gloo"
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    folder = tmp_path_factory.mktemp("ranks")
    jobs = [
        subprocess.Popen([sys.executable, str(WORKER), str(rank), str(folder)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        for job in jobs:
            _, errors = job.communicate(timeout=400)
            assert job.returncode == 0, errors
    finally:
        for job in jobs:
            job.kill()
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("entry", FAMILIES, ids=lambda e: e.model_type)
def test_gradients_and_a_step_are_those_of_one_process(entry: object, kind: str, results: dict[str, dict[str, float]]):
    found = results[entry.model_type]  # type: ignore[attr-defined]
    assert found[kind] < 1e-5
    assert found[f"{kind} loss"] < 1e-5


@pytest.mark.parametrize("entry", FAMILIES, ids=lambda e: e.model_type)
def test_sharded_parameters_without_memory_are_initialised(entry: object, results: dict[str, dict[str, float]]):
    assert results[entry.model_type]["not initialised"] == 0  # type: ignore[attr-defined]
