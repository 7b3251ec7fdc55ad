"""The backend against fla's conformance kit, and what the kit cannot know."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from fla.backends import explain, last_decision, list_backends, list_plugins, use_backend
from fla.ops.retention import chunk_retention
from fla.testing import BackendConformance

from fla_backend_short_retention.plugin import LIMIT


class TestConformance(BackendConformance):
    backend_type = "short_retention"


def test_it_is_found_as_it_is_installed():
    plugin = next(p for p in list_plugins() if p["distribution"] == "fla-backend-short-retention")
    assert plugin["ok"], plugin["reason"]
    row = next(r for r in list_backends("retention") if r["backend"] == "short_retention")
    assert row["functions"] == [chunk_retention.__name__]


def test_importing_it_loads_no_kernels():
    code = "import sys, fla_backend_short_retention.plugin; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not {"torch", "fla_backend_short_retention.kernel"} & set(done.stdout.split())


@pytest.mark.parametrize("T", [1, LIMIT, LIMIT + 1])
def test_long_sequences_go_to_core_unless_it_is_asked_for_by_name(T):
    x = torch.randn(1, T, 2, 16)
    chunk_retention(x, x, x)
    assert last_decision().backend == ("short_retention" if T <= LIMIT else "torch")
    with use_backend("short_retention"):
        chunk_retention(x, x, x)
    assert last_decision().backend == "short_retention"


def test_what_it_declines_it_declines_with_a_reason():
    x = torch.randn(1, 300, 2, 16)
    verdict = explain(chunk_retention, x, x, x).verdict("short_retention")
    assert verdict.code == "slower"
    assert "256 tokens" in verdict.reason
    verdict = explain(chunk_retention, x, x, x, cu_seqlens=torch.tensor([0, 300])).verdict("short_retention")
    assert (verdict.code, verdict.reason) == ("unsupported", "packed sequences (cu_seqlens) are not supported")


def test_tables_made_under_inference_mode_serve_training_too():
    x = torch.randn(1, 23, 3, 16)
    with torch.inference_mode():
        chunk_retention(x, x, x)
    x.requires_grad_()
    chunk_retention(x, x, x)[0].sum().backward()
    assert last_decision().backend == "short_retention"
    assert x.grad is not None
