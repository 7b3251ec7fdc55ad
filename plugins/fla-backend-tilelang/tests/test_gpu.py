# SPDX-License-Identifier: MIT
"""On a Hopper card with tilelang and nvcc, under a strict pin: fla's conformance kit, and views that begin anywhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fla_backend_tilelang.plugin import KDA

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not KDA.is_available(), reason="no tilelang or nvcc"),
]


def test_views_that_begin_anywhere_are_copied(backends, gdn, kda):
    """TMA reads from 16-byte boundaries only."""
    from fla.backends import use_backend
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    torch.manual_seed(0)
    for op, made in ((chunk_gated_delta_rule, gdn(T=96)), (chunk_kda, kda(T=96))):
        x = {n: -torch.rand_like(t, device="cuda") if torch.is_tensor(t) else t for n, t in made.items()}
        x |= {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "output_final_state": True}
        shifted = dict(x)
        for name, t in x.items():
            if torch.is_tensor(t):
                shifted[name] = t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)
        with torch.no_grad(), use_backend("tilelang", strict=True):
            results = op(**x), op(**shifted)
        for a, b in zip(*results, strict=True):
            assert a.isfinite().all()
            assert torch.equal(a, b)


def test_the_conformance_kit_is_green():
    """In a process of its own: the kit needs the plugin as it is installed."""
    command = [sys.executable, "-m", "pytest", "--pyargs", "fla.testing.conformance", "--fla-backend", "tilelang"]
    done = subprocess.run(
        [*command, "-q", "-p", "no:cacheprovider"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
