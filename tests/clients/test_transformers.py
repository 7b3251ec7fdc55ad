# SPDX-License-Identifier: MIT
"""Models of transformers that call us compute the same as without us: outputs, gradients, greedy tokens.

The models are transformers' own, unmodified, each run in one process with the package and in one without it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from fla.utils import assert_close

SCRIPT = Path(__file__).with_name("run_client.py")
OPS = {
    "qwen3_next": "gated_delta_rule.{}_gated_delta_rule",
    "qwen3_5": "gated_delta_rule.{}_gated_delta_rule",
    "olmo_hybrid": "gated_delta_rule.{}_gated_delta_rule",
    "kimi_linear": "kda.{}_kda",
}
every_model = pytest.mark.parametrize("name", OPS)
# Before 5.16 transformers asks for a GPU before it calls us.
needs_no_gpu = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.16"), reason="transformers wants a GPU"
)


def run_both(folder: Path, groups: list[list[str]], *options: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Results by model with and without the package, every group of models in two processes of its own."""
    jobs = []
    for i, models in enumerate(groups):
        for kind, extra in (("with", []), ("without", ["--without-fla"])):
            file = folder / f"{kind}{i}.pt"
            command = [sys.executable, str(SCRIPT), str(file), "--models", *models, *options, *extra]
            jobs.append((kind, file, subprocess.Popen(command, stderr=subprocess.PIPE, text=True)))
    results: dict[str, dict[str, Any]] = {"with": {}, "without": {}}
    for kind, file, job in jobs:
        _, errors = job.communicate(timeout=500)
        assert job.returncode == 0, errors
        results[kind].update(torch.load(file, weights_only=True))
    return results["with"], results["without"]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    return run_both(tmp_path_factory.mktemp("cpu"), [[*OPS]])


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    options = ("--device", "cuda", "--dtype", "bfloat16")
    return run_both(tmp_path_factory.mktemp("gpu"), [[name] for name in OPS], *options)


def check(
    name: str, both: tuple[dict[str, Any], dict[str, Any]], backend: str, forward: float, backward: float
) -> None:
    ours, theirs = both
    if name not in theirs:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    mine, wanted = ours[name], theirs[name]
    calls = mine["calls"]
    # Three linear layers: two training passes with a padded one, then prompts and steps of two generations.
    assert calls[OPS[name].format("chunk"), backend] == 12
    assert calls[OPS[name].format("fused_recurrent"), backend] == 42
    for key in ("logits", "loss", "padded"):
        assert_close(key, wanted[key].float(), mine[key].float(), forward)
    assert mine["gradients"].keys() == wanted["gradients"].keys()
    for key, gradient in wanted["gradients"].items():
        assert_close(key, gradient.float(), mine["gradients"][key].float(), backward)
    for key in ("tokens", "padded tokens"):
        assert torch.equal(mine[key], wanted[key]), key


@needs_no_gpu
@every_model
def test_the_same_in_float32_on_the_cpu(name: str, on_cpu: tuple[dict[str, Any], dict[str, Any]]):
    check(name, on_cpu, "torch", 1e-4, 1e-3)


@pytest.mark.gpu
@every_model
def test_the_same_in_bfloat16_on_the_gpu(name: str, on_gpu: tuple[dict[str, Any], dict[str, Any]]):
    check(name, on_gpu, "triton", 2e-2, 3e-2)
