# SPDX-License-Identifier: MIT
"""Plans for two ranks (gloo) against one rank, outputs and gradients."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
import os, sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from fla.modules import FusedLinearCrossEntropyLoss, LayerNorm, RMSNorm
from fla.modules.fused_linear_cross_entropy import LinearLossParallel
from fla.modules.mlp import SwiGLULinear
from fla.modules.norm import NormParallel
from fla.modules.mlp import SwiGLULinearParallel
from fla.modules.parallel import PrepareModuleWeight

torch.set_num_threads(1)
rank = 0 if os.fork() else 1  # before autograd has started any thread
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
close = torch.testing.assert_close

for kind in (RMSNorm, LayerNorm):
    norm, split = (kind(6, bias=True, dtype=torch.float64) for _ in range(2))
    split = parallelize_module(split, mesh, NormParallel())
    assert isinstance(split.weight, DTensor)
    x = torch.randn(2, 8, 6, dtype=torch.float64)
    part = x[:, rank * 4 : rank * 4 + 4].clone().requires_grad_()
    whole = x.clone().requires_grad_()
    y, ref = split(part), norm(whole)
    assert tuple(y.placements) == (Shard(1),)
    close(y.full_tensor(), ref)
    y.to_local().square().sum().backward()
    ref.square().sum().backward()
    close(part.grad, whole.grad[:, rank * 4 : rank * 4 + 4])
    for p, q in zip(split.parameters(), norm.parameters()):
        close(p.grad.full_tensor(), q.grad)
try:
    split("text")
    raise SystemExit("a text was taken")
except ValueError:
    pass

mine = slice(rank * 3, rank * 3 + 3)
for bias in (None, torch.randn(5, dtype=torch.float64)):
    args = [torch.randn(2, 4, 6, dtype=torch.float64), torch.randn(2, 4, 6, dtype=torch.float64)]
    args.append(torch.randn(5, 6, dtype=torch.float64))
    whole = [t.clone().requires_grad_() for t in args]
    part = [t[..., mine].clone().requires_grad_() for t in args]
    fn = parallelize_module(SwiGLULinear(), mesh, SwiGLULinearParallel())
    y, ref = fn(*part, bias), SwiGLULinear()(*whole, bias)
    assert not isinstance(y, DTensor)
    close(y, ref)
    y.square().sum().backward()
    ref.square().sum().backward()
    for p, q in zip(part, whole):
        close(p.grad, q.grad[..., mine])

head = [torch.randn(2, 8, 6, dtype=torch.float64), torch.randint(0, 10, (2, 8))]
head += [torch.randn(10, 6, dtype=torch.float64), torch.randn(10, dtype=torch.float64)]
whole = [t.clone().requires_grad_(t.is_floating_point()) for t in head]
part = [t[:, rank * 4 : rank * 4 + 4].clone() if i < 2 else t.clone() for i, t in enumerate(head)]
part = [t.requires_grad_(t.is_floating_point()) for t in part]
loss = parallelize_module(FusedLinearCrossEntropyLoss(reduction="sum"), mesh, LinearLossParallel())
y, ref = loss(*part), FusedLinearCrossEntropyLoss(reduction="sum")(*whole)
total = y.detach().clone()
dist.all_reduce(total)
close(total, ref)
y.backward()
ref.backward()
close(part[0].grad, whole[0].grad[:, rank * 4 : rank * 4 + 4])
close(part[2].grad, whole[2].grad)
close(part[3].grad, whole[3].grad)
loss(part[0].detach(), part[1], DTensor.from_local(part[2].detach(), mesh, [Replicate()]), None)
try:
    loss(*part[:3])
    raise SystemExit("three inputs were taken")
except ValueError as error:
    assert "by position" in str(error)

layer = torch.nn.Linear(4, 2)
layer.weight.requires_grad_(False)
local = layer.weight.clone()
parallelize_module(layer, mesh, PrepareModuleWeight(layouts=Shard(0)))
assert layer.weight.shape == (4, 4) and not layer.weight.requires_grad and layer.bias.requires_grad
close(layer.weight.to_local(), local)
dist.barrier()
dist.destroy_process_group()
if rank == 1:
    os._exit(0)
pid, status = os.wait()
print("ok" if status == 0 else "rank 1 failed")
"""


def test_plans_for_two_ranks(tmp_path: Path):
    run = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path / "store")], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.stdout.strip() == "ok", run.stderr


def test_importing_a_norm_does_not_import_the_plans():
    code = "import sys, fla.modules.norm, fla.modules.mlp; assert 'fla.modules.parallel' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
