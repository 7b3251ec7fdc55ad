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
from torch import Tensor

from fla.utils import assert_close, get_err_ratio

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


Results = dict[str, dict[str, Any]]
KINDS = {"ours": (), "fallback": ("--without-fla",), "exact": ("--without-fla", "--exact")}


def run_all(folder: Path, kinds: list[str], groups: list[list[str]], *options: str) -> Results:
    """Results by kind and model; every kind of a group of models runs in a process of its own."""
    jobs = []
    for i, models in enumerate(groups):
        for kind in kinds:
            file = folder / f"{kind}{i}.pt"
            command = [sys.executable, str(SCRIPT), str(file), "--models", *models, *options, *KINDS[kind]]
            jobs.append((kind, file, subprocess.Popen(command, stderr=subprocess.PIPE, text=True)))
    results: Results = {kind: {} for kind in kinds}
    for kind, file, job in jobs:
        _, errors = job.communicate(timeout=500)
        assert job.returncode == 0, errors
        results[kind].update(torch.load(file, weights_only=True))
    return results


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_all(tmp_path_factory.mktemp("cpu"), ["ours", "fallback"], [[*OPS]])


@pytest.fixture(scope="module")
def in_bfloat16(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_all(tmp_path_factory.mktemp("bf16"), [*KINDS], [["qwen3_5", "kimi_linear"]], "--dtype", "bfloat16")


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> Results:
    options = ("--device", "cuda", "--dtype", "bfloat16")
    return run_all(tmp_path_factory.mktemp("gpu"), [*KINDS], [[name] for name in OPS], *options)


def compare(what: str, mine: Tensor, wanted: Tensor, exact: Tensor | None, limit: float) -> None:
    """Ours and the fallback's are within `limit`, or rounding takes the fallback so far away that ours is as exact."""
    if exact is not None and get_err_ratio(wanted.float(), mine.float()) >= limit:
        wanted_off, off = (get_err_ratio(exact, x.float()) for x in (wanted, mine))
        assert off <= 1.2 * wanted_off, f"{what}: {off:.2e} from float32, the fallback {wanted_off:.2e}"
        return
    assert_close(what, wanted.float(), mine.float(), limit)


def gates_together(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of `A_log` and `dt_bias` of all layers as one tensor each.

    They are a handful of numbers, each a sum over all tokens of terms of both signs that may cancel in a layer: in
    Qwen3.5 the fallback's own is 9 % from float32 in one. Over all layers they are as well determined as the others.
    """
    found: dict[str, list[Tensor]] = {}
    for key, gradient in gradients.items():
        kind = key.rpartition(".")[2]
        found.setdefault(kind if kind in ("A_log", "dt_bias") else key, []).append(gradient.flatten())
    return {key: torch.cat(parts) for key, parts in found.items()}


def check(name: str, results: Results, backend: str, forward: float, backward: float) -> None:
    if name not in results["fallback"]:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    mine, wanted = results["ours"][name], results["fallback"][name]
    exact = results["exact"][name] if "exact" in results else None
    calls = mine["calls"]
    # Three linear layers: two training passes with a padded one, then prompts and steps of two generations.
    assert calls[OPS[name].format("chunk"), backend] == 12
    assert calls[OPS[name].format("fused_recurrent"), backend] == 42
    for key in ("logits", "loss", "padded"):
        compare(key, mine[key], wanted[key], exact and exact[key], forward)
    assert mine["gradients"].keys() == wanted["gradients"].keys()
    gradients = [(results[kind][name]["gradients"] if kind in results else None) for kind in KINDS]
    if exact is not None:
        gradients = [None if found is None else gates_together(found) for found in gradients]
    ours, theirs, true = gradients
    for key, gradient in theirs.items():
        compare(key, ours[key], gradient, true and true[key], backward)
    for key in ("tokens", "padded tokens"):
        same = [torch.equal(mine[key], other[key]) for other in (wanted, exact) if other is not None]
        assert any(same), key


@needs_no_gpu
@every_model
def test_the_same_in_float32_on_the_cpu(name: str, on_cpu: Results):
    check(name, on_cpu, "torch", 1e-4, 1e-3)


@needs_no_gpu
@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear"])
def test_the_same_in_bfloat16_on_the_cpu(name: str, in_bfloat16: Results):
    check(name, in_bfloat16, "torch", 2e-2, 3e-2)


@pytest.mark.gpu
@every_model
def test_the_same_in_bfloat16_on_the_gpu(name: str, on_gpu: Results):
    check(name, on_gpu, "triton", 2e-2, 3e-2)
