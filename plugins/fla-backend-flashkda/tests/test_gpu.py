# SPDX-License-Identifier: MIT
"""The real wheel, where there is one: through the public op, and through fla's conformance kit."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fla.backends import explain, last_decision, use_backend
from fla.ops.kda import chunk_kda
from fla.ops.kda.gate import naive_kda_lowerbound_gate
from fla.ops.kda.naive import naive_recurrent_kda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("flash_kda") is None, reason="flash_kda is not installed"),
]


def test_the_public_op_runs_in_it_and_is_right(backend, call):
    torch.manual_seed(0)
    x = {n: torch.randn_like(t, device="cuda") if torch.is_tensor(t) else t for n, t in call(B=2, T=131, H=3).items()}
    x["initial_state"] = torch.randn(2, 3, 128, 128, device="cuda")
    with torch.no_grad(), use_backend("flash_kda", strict=True):
        o, final = chunk_kda(**x, output_final_state=True)
    assert last_decision().backend == "flash_kda"
    wide = {n: x[n].double() for n in ("q", "k", "v", "g", "beta")}
    decay = naive_kda_lowerbound_gate(wide["g"], x["A_log"].double(), x["dt_bias"].double(), -5.0, torch.float64)
    want, last = naive_recurrent_kda(
        torch.nn.functional.normalize(wide["q"], dim=-1),
        torch.nn.functional.normalize(wide["k"], dim=-1),
        wide["v"],
        decay,
        wide["beta"].sigmoid(),
        initial_state=x["initial_state"].double(),
        output_final_state=True,
    )
    assert ((o.double() - want).norm() / want.norm()).item() < 6e-3
    assert ((final.double() - last).norm() / last.norm()).item() < 6e-3


def test_a_gradient_goes_to_core(backend, call):
    x = {n: torch.randn_like(t, device="cuda") if torch.is_tensor(t) else t for n, t in call().items()}
    x["q"].requires_grad_()
    chunk_kda(**x)[0].sum().backward()
    assert last_decision().backend != "flash_kda"
    assert explain(chunk_kda, **x).verdict("flash_kda").reason.startswith("a gradient is needed")


def test_the_conformance_kit_is_green():
    """In a process of its own: the kit needs the plugin as it is installed."""
    command = [sys.executable, "-m", "pytest", "--pyargs", "fla.testing.conformance", "--fla-backend", "flash_kda"]
    done = subprocess.run(
        [*command, "-q", "-p", "no:cacheprovider"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
