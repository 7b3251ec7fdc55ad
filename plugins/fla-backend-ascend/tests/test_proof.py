# SPDX-License-Identifier: MIT
"""The one-time proof: right kernels pass, wrong ones and such that raise are named. In the interpreter, in float32."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fla_backend_ascend import plugin, proof
from fla_backend_ascend.chips import KIB
from fla_backend_ascend.policy import described

from fla.ops._common import policy

CPU = torch.device("cpu")
FUNCTIONS = [(operation, name) for operation, names in plugin.COVERED.items() for name in names]


@pytest.fixture
def npu():
    policy.describe_chip("cpu", lambda device: described(192 * KIB, 20))
    yield
    policy.describe_chip("cpu", None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
@pytest.mark.parametrize(("operation", "name"), FUNCTIONS)
def test_the_kernels_pass(npu, operation, name):
    op = plugin._op(operation, name)
    assert proof.proof(op, getattr(plugin.Ascend(operation), name), CPU, torch.float32) == (True, None)


@pytest.mark.parametrize(
    ("what", "wrong"),
    [
        ("outputs", lambda o, final: (o * 1.2, final)),
        ("outputs", lambda o, final: (o + float("nan"), final)),
        ("final states", lambda o, final: (o, final.roll(1, 0))),
        ("gradients of q", lambda o, final: (o.detach() + (o - o.detach()) * 1.2, final)),
    ],
)
def test_what_is_wrong_is_named(what, wrong):
    op = plugin._op("simple_gla", "chunk_simple_gla")
    works, reason = proof.proof(op, lambda **x: wrong(*op.fn(**x)), CPU, torch.float32)
    assert not works
    assert reason.startswith(f"a small call of chunk_simple_gla gives wrong {what} (RMS ratio ")


def test_what_raises_is_quoted():
    def fails(**x):
        raise RuntimeError("tl.dot is not there")

    op = plugin._op("kda", "fused_recurrent_kda")
    expected = (False, "a small call of fused_recurrent_kda failed (RuntimeError: tl.dot is not there)")
    assert proof.proof(op, fails, CPU) == expected


#: What triton-ascend may lack, or has by other names.
WITHOUT = """
import sys
import triton.language as tl
for name in ("make_tensor_descriptor", "load_tensor_descriptor", "store_tensor_descriptor", "tensor_descriptor",
             "gather", "inline_asm_elementwise", "cat", "map_elementwise"):
    if hasattr(tl, name):
        delattr(tl, name)
import torch
from fla.ops._common import policy
from fla_backend_ascend import plugin, proof
from fla_backend_ascend.policy import described
policy.has_descriptors = lambda: False
policy.describe_chip("cpu", lambda device: described(192 * 1024, 20))
for operation, names in plugin.COVERED.items():
    for name in names:
        run = getattr(plugin.Ascend(operation), name)
        answer = proof.proof(plugin._op(operation, name), run, torch.device("cpu"), torch.float32)
        assert answer == (True, None), answer
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_the_kernels_pass_in_a_triton_without_descriptors_and_other_features():
    root = Path(__file__).parents[3]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{Path(__file__).parents[1] / 'src'}:{root}"}
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
