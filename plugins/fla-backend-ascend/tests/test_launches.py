# SPDX-License-Identifier: MIT
"""No launch of core has more programs than the bound by which calls are cut. Launches are counted, nothing is run."""

from __future__ import annotations

import itertools

import pytest
import torch
from fla_backend_ascend import heads, plugin
from fla_backend_ascend.chips import KIB
from fla_backend_ascend.policy import described

from fla.ops._common import launch, policy

FUNCTIONS = [(operation, name) for operation, names in plugin.COVERED.items() for name in names]
H = 2
# Sequences, tokens of each, K, V: long ones, short ones, single tokens.
SIZES = [*itertools.product([(1, 600), (40, 3), (64, 1)], [(16, 16), (40, 100), (128, 128), (256, 256)])]


@pytest.fixture
def grids(monkeypatch):
    """Programs of every launch, on an NPU with few cores: none is split over time, and with many: all that may be."""
    found = []
    monkeypatch.setattr(launch.Fixed, "__call__", lambda self, grid, args, given: found.append(grid))
    yield found
    policy.describe_chip("cpu", None)


@pytest.mark.parametrize("cores", [1, 2000])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize(("operation", "name"), FUNCTIONS)
def test_no_launch_has_more_programs_than_the_bound(grids, operation, name, packed, cores):
    chip = described(192 * KIB, cores)
    policy.describe_chip("cpu", lambda device: chip)
    op = plugin._op(operation, name)
    for ((N, T), (K, V)), dtype, v_first in itertools.product(SIZES, (torch.bfloat16, torch.float32), (False, True)):
        if operation == "kda" and dtype == torch.float32 and K > plugin.MAX_WIDE_K:
            continue
        B, length = (1, N * T) if packed else (N, T)
        new = lambda *shape, kind=dtype: torch.zeros(shape, dtype=kind)
        x = {"q": new(B, length, H, K), "k": new(B, length, H, K), "v": new(B, length, H, V), "state_v_first": v_first}
        vector = operation in ("kda", "gla")
        gate = "gk" if name == "fused_recurrent_gla" else "g"
        x[gate] = new(B, length, H, *([K] if vector else []), kind=torch.float32)
        if "beta" in op.signature.parameters:
            x["beta"] = new(B, length, H)
        if packed:
            x["cu_seqlens"] = torch.arange(0, N * T + 1, T)
        for grad in (False, True):
            grids.clear()
            x["v"].requires_grad_(grad)
            o, _ = plugin.core_path(op)(**x)
            if grad:
                o.sum().backward()
            bound = heads.programs(N * T, N, K, V) * H
            assert grids
            assert max(grids) <= bound, (N, T, K, V, dtype, v_first, grad)
