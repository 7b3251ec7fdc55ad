# SPDX-License-Identifier: MIT
"""A first call is walked through on the meta device; that must not load torch's compiler, which takes seconds."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

CODE = """
import importlib, sys
import torch
from fla.backends import use_backend
from fla.ops._common.ahead import ahead
from fla.ops._common.launch import Fixed

walked = []

def first_call(known, key, more, inputs, step):
    walked.append(key)
    with ahead(inputs[0].device), torch.no_grad():
        step(*(None if x is None else torch.empty(x.shape, dtype=x.dtype, device="meta") for x in inputs))

engines = "_delta.autograd _delta.vector_autograd _linear.autograd _linear.vector_autograd"
for name in engines.split():
    importlib.import_module(f"fla.ops.{name}").first_call = first_call
Fixed.__call__ = lambda self, grid, args, given: None
B, T, H, D = 1, 100, 2, 64
q, k, v, gk = (torch.randn(B, T, H, D).requires_grad_() for _ in range(4))
g, beta = torch.randn(B, T, H), torch.rand(B, T, H)
calls = {
    "gated_delta_rule": dict(g=g, beta=beta), "kda": dict(g=gk, beta=beta, safe_gate=True),
    "delta_rule": dict(beta=beta),
    "simple_gla": dict(g=g), "gla": dict(g=gk), "retention": {}, "linear_attn": {},
}
before = set(sys.modules)
for name, more in calls.items():
    op = getattr(importlib.import_module(f"fla.ops.{name}"), f"chunk_{name}")
    for train in (False, True):
        with use_backend("triton", strict=True), torch.set_grad_enabled(train):
            op(q, k, v, **more)
assert len(walked) >= len(calls), walked
print(sorted({m.split(".")[0] if m.startswith("sympy") else m for m in set(sys.modules) - before
              if m.startswith(("sympy", "torch._dynamo", "torch._inductor", "torch.fx"))})[:5])
"""


def test_walking_through_a_first_call_loads_no_compiler():
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().splitlines()[-1] == "[]"
