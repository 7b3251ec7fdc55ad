# SPDX-License-Identifier: MIT
"""After `fla warmup` a process compiles nothing: no call of any size adds to the cache on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

pytestmark = pytest.mark.gpu

# Calls of many sizes, forward and backward; says what they added to Triton's cache.
CALLS = """
import json, sys
import torch
from fla.backends import use_backend
from fla.cli._warm import cached_kernels
from fla.ops.gated_delta_rule import chunk_gated_delta_rule

before = cached_kernels()
sizes = [(2, 100, 3), (1, 5000, 8), (4, 2048, 16), (1, 20000, 2), (1, 1, 1), (8, 64, 40), (3, 77, 100)]
for B, T, H in sizes:
    for packed in (False, True):
        B = 1 if packed else B
        cu = torch.tensor([0, T // 3, T // 3, T], device="cuda") if packed else None
        x = [torch.randn(B, T, H, 32, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        x += [torch.randn(B, T, H, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        flags = dict(
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            A_log=torch.zeros(H, device="cuda"), dt_bias=torch.zeros(H, device="cuda"), cu_seqlens=cu,
        )
        with use_backend("triton", strict=True):
            with torch.no_grad():
                chunk_gated_delta_rule(*x, output_final_state=True, **flags)
            x = [t.requires_grad_() for t in x]
            o, _ = chunk_gated_delta_rule(*x, **flags)
            o.backward(torch.ones_like(o))
torch.cuda.synchronize()
print(json.dumps(sorted(cached_kernels() - before)))
"""


def test_nothing_is_left_to_compile(tmp_path):
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    words = "warmup gated_delta_rule.chunk_gated_delta_rule --form all_in_kernel --head-dim 32 --gates float32 --json"
    done = subprocess.run([sys.executable, "-m", "fla", *words.split()], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["new_kernels"] > 0
    assert all(not task["refused"] for task in told["tasks"])
    after = subprocess.run([sys.executable, "-c", CALLS], env=env, capture_output=True, text=True)
    assert after.returncode == 0, after.stderr
    assert json.loads(after.stdout.splitlines()[-1]) == []
