# SPDX-License-Identifier: MIT
"""One of two processes that train every family in parallel: `python train_worker.py RANK FOLDER`.

Each rank sees half of a batch. The gradients are compared with those of one process that sees all of it, and so are the
losses after a step of the optimiser. Rank 0 writes what it found to FOLDER/results.json.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from fla.models._index import FAMILIES

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "head_dim": 8,
    "expand": 1,
    "expand_ratio": 2,
    "gate_low_rank_dim": 6,
    "intermediate_size": 64,
    "num_slots": 8,
    "pad_token_id": 0,
    "proj_low_rank_dim": 4,
    "state_size": 16,
    "vocab_size": 62,
}
ATTENTION = {"layers": [0], "num_heads": 2, "num_kv_heads": 1, "window_size": 5}


def make(entry: Any, device: str = "cpu") -> Any:
    torch.manual_seed(0)
    package = importlib.import_module(f"fla.models.{entry.package}")
    sizes = {name: value for name, value in TINY.items() if name in package.FAMILY.fields}
    config = getattr(package, entry.names[0])(**sizes, attn=ATTENTION)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradients(model: Any) -> dict[str, Tensor]:
    found = {n.removeprefix("module."): whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    assert len(found) == len(list(model.parameters()))
    return found


def shard(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.get_decoder().layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(hasattr(p, "full_tensor") for p in model.parameters())
    return model


def step(model: Any, x: Tensor) -> float:
    """Backward, a step of the optimiser, and the loss after it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(x, labels=x).loss.backward()
    step.gradients = gradients(model)  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        return float(model(x, labels=x).loss)


def off(wanted: dict[str, Tensor], got: dict[str, Tensor]) -> float:
    """The largest relative difference of a gradient."""
    assert wanted.keys() == got.keys()
    return max(float((wanted[n] - got[n]).norm() / wanted[n].norm().clamp(min=1e-6)) for n in wanted)


def compare(entry: Any, rank: int) -> dict[str, float]:
    x = torch.randint(3, 61, (4, 20), generator=torch.Generator().manual_seed(1))
    mine = x[2 * rank : 2 * rank + 2]
    loss = torch.tensor(step(make(entry), x))
    wanted = step.gradients  # type: ignore[attr-defined]
    found = {}
    for name, wrap in (("ddp", DistributedDataParallel), ("fsdp", shard)):
        after = torch.tensor(step(wrap(make(entry)), mine))
        dist.all_reduce(after)
        found[name] = off(wanted, step.gradients)  # type: ignore[attr-defined]
        found[f"{name} loss"] = float((after / 2 - loss).abs())
    # Built without memory, sharded, then initialised in place, as trainers do.
    model = shard(make(entry, "meta"))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(torch.nan)
    model.post_init()
    found["not initialised"] = sum(not whole(p.detach()).isfinite().all() for p in model.parameters())
    return found


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    results = {entry.model_type: compare(entry, rank) for entry in FAMILIES}
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
    # Everything is said. A process on a busy machine has once aborted ("terminate called without an active exception"),
    # as it does where a thread of torch's still runs at the end: it does not wait for that end.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
