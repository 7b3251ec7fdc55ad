# SPDX-License-Identifier: MIT
"""A call as several, each over some of the heads: one launch takes 65,535 programs, and heads know nothing of each
other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fla.ops._common.policy import pow2
from fla_backend_ascend.chips import GRID_LIMIT

#: The axis of heads of a tensor argument. What is not named here goes to every part as it is.
AXES = dict.fromkeys(("q", "k", "v", "g", "gk", "gv", "beta"), 2) | {"initial_state": 1, "g_gamma": 0}
#: Parameters of the gate: HV values, or HV groups of them, in any shape.
FLAT = ("A_log", "dt_bias")
LEAST_CHUNK, LEAST_BLOCK = 32, 16
#: The least columns of a state in a program of the token-by-token kernels, and the least sides of its blocks in the
#: passes over states, of which the linear engine runs two at once.
LEAST_COLUMNS, LEAST_SIDE = 4, 32


def programs(tokens: int, sequences: int, K: int, V: int) -> int:
    """No launch for one head has more programs than this, whatever blocks the plan has."""
    # Chunks of 64 tokens in halves: both halves of a ragged one count.
    chunks = -(-tokens // LEAST_CHUNK) + 2 * sequences
    blocks = 2 * -(-K // LEAST_SIDE) * -(-V // LEAST_SIDE)
    return max(chunks * (pow2(max(K, V)) // LEAST_BLOCK), sequences * max(blocks, -(-V // LEAST_COLUMNS)))


def at_once(tokens: int, sequences: int, K: int, V: int, group: int, limit: int = GRID_LIMIT) -> int:
    """Key heads of a part, each with `group` value heads; 0 where not even one fits."""
    return limit // (programs(tokens, sequences, K, V) * group)


def in_parts(run: Callable[..., Any], arguments: dict[str, Any], limit: int = GRID_LIMIT) -> Any:
    """Results of ``run(**arguments)``, with as many calls as the limit asks for. Differentiable."""
    q, v = arguments["q"], arguments["v"]
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    cu = arguments.get("cu_seqlens")
    size = at_once(B * T, B if cu is None else cu.shape[0] - 1, K, V, HV // H if H else 1, limit)
    if size >= H:
        return run(**arguments)
    parts = []
    for first in range(0, H, size):
        part = dict(arguments)
        for name, x in arguments.items():
            if not isinstance(x, Tensor):
                continue
            if name in AXES:
                axis = AXES[name]
                each = x.shape[axis] // H
                part[name] = x.narrow(axis, first * each, min(size, H - first) * each)
            elif name in FLAT:
                each = x.numel() // H
                part[name] = x.reshape(-1).narrow(0, first * each, min(size, H - first) * each)
        parts.append(run(**part))
    joined = []
    # Outputs and states before chunks have their heads on axis 2, final states on axis 1.
    for axis, results in zip((2, 1, 2), zip(*parts, strict=True), strict=False):
        joined.append(None if results[0] is None else torch.cat(results, axis))
    return tuple(joined)
