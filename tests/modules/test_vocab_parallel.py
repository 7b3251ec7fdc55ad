# SPDX-License-Identifier: MIT
"""Both losses with the classes split over two ranks (gloo) against one rank."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CODE = """
import os, sys, torch, torch.distributed as dist
from fla.backends import use_backend
from fla.modules.fused_cross_entropy import cross_entropy_loss
from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss

torch.set_num_threads(1)
rank = 0 if os.fork() else 1  # before autograd has started any thread
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
group = dist.group.WORLD
# The kernels, in the interpreter, compute in float32.
dtype = torch.float64 if sys.argv[2] == "torch" else torch.float32
pinned = use_backend(sys.argv[2], strict=True)
pinned.__enter__()
torch.manual_seed(0)
x = torch.randn(11, 6, dtype=dtype, requires_grad=True)
W = torch.randn(20, 6, dtype=dtype, requires_grad=True)
target = torch.randint(0, 20, (11,))
target[3] = -100
mine = slice(rank * 10, rank * 10 + 10)

def compare(whole, part, wanted, got):
    torch.testing.assert_close(part, whole)
    expected = torch.autograd.grad(whole.sum(), wanted)
    for e, g in zip((expected[0], expected[1][mine]), torch.autograd.grad(part.sum(), got)):
        torch.testing.assert_close(g, e)

for options in ({}, {"label_smoothing": 0.1, "logit_softcapping": 3.0}, {"logit_scale": 0.5, "use_l2warp": True}):
    shard = W.detach()[mine].clone().requires_grad_()
    whole = fused_linear_cross_entropy_loss(x, target, W, num_chunks=3, **options)
    part = fused_linear_cross_entropy_loss(x, target, shard, num_chunks=3, process_group=group, **options)
    compare(whole, part, (x, W), (x, shard))

logits = (x @ W.T).detach().requires_grad_()
shard = logits.detach()[:, mine].clone().requires_grad_()
options = {"label_smoothing": 0.1, "lse_square_scale": 0.01}
whole, z = cross_entropy_loss(logits, target, **options)
part, z_part = cross_entropy_loss(shard, target, process_group=group, **options)
torch.testing.assert_close(part, whole)
torch.testing.assert_close(z_part, z)
(e,), (g,) = torch.autograd.grad(whole.sum(), [logits]), torch.autograd.grad(part.sum(), [shard])
torch.testing.assert_close(g, e[:, mine])
pinned.__exit__(None, None, None)
dist.barrier()
dist.destroy_process_group()
if rank == 1:
    os._exit(0)
pid, status = os.wait()
print("ok" if status == 0 else "rank 1 failed")
"""


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_classes_split_over_two_ranks(backend: str, tmp_path: Path):
    if backend == "triton" and (torch.cuda.is_available() or importlib.util.find_spec("triton") is None):
        pytest.skip("needs the Triton interpreter")
    run = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path / "store"), backend],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.stdout.strip() == "ok", run.stderr
