# SPDX-License-Identifier: MIT
"""The table of the linear family: what distinguishes its ops.

One recurrence serves all of them, per head with state ``S [K, V]``::

    S_t = diag(exp(g_t + g_gamma + gk_t)) S_{t-1} diag(exp(gv_t)) + k_t (x) v_t
    o_t = scale * q_t S_t

A row says which argument of an op is which of these gates, in natural logarithms, or which fixed decay its heads have.
An op with a bonus ``u`` reads the state before the token instead, and the token itself with weight ``u``::

    o_t = scale * q_t (S_{t-1} + diag(u) k_t (x) v_t)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fla.ops._common.gates import compute_dtype

__all__ = [
    "CHUNK_GLA",
    "GATE_SHAPES",
    "LIGHTNING_ATTN",
    "LINEAR_ATTN",
    "RECURRENT_GLA",
    "RETENTION",
    "ROWS",
    "RWKV6",
    "SIMPLE_GLA",
    "LinearRow",
    "lightning_decay",
    "retention_decay",
]

GATE_SHAPES = {"g": "B T H", "g_gamma": "H", "gk": "B T H K", "gv": "B T H V", "bonus": "H K"}


@dataclass(frozen=True)
class LinearRow:
    """One op of the family.

    Attributes:
        op: operation name, the room under ``fla.ops``.
        gates: argument of the op -> gate of the recurrence (or the bonus), a key of `GATE_SHAPES`.
        normaliser: whether the op may divide by ``scale * q_t . sum(k)``, and then carries that sum beside its state.
        query: argument of the op that is the query.
    """

    op: str
    gates: Mapping[str, str] = field(default_factory=dict)
    normaliser: bool = False
    query: str = "q"


SIMPLE_GLA = LinearRow("simple_gla", {"g": "g", "g_gamma": "g_gamma"})
CHUNK_GLA = LinearRow("gla", {"g": "gk"})
RECURRENT_GLA = LinearRow("gla", {"gk": "gk", "gv": "gv"})
RETENTION = LinearRow("retention")
LINEAR_ATTN = LinearRow("linear_attn", normaliser=True)
LIGHTNING_ATTN = LinearRow("lightning_attn")
RWKV6 = LinearRow("rwkv6", {"w": "gk", "u": "bonus"}, query="r")

ROWS = (SIMPLE_GLA, CHUNK_GLA, RECURRENT_GLA, RETENTION, LINEAR_ATTN, LIGHTNING_ATTN, RWKV6)


def retention_decay(q: Tensor) -> Tensor:
    """``ln(1 - 2^(-5-h))`` for head h of ``[B, T, H, K]``: ``[H]``. Sun et al., "Retentive Network" (2023)."""
    return torch.log1p(-torch.exp2(-5.0 - _heads(q)))


def lightning_decay(q: Tensor, layer_idx: int, num_layers: int) -> Tensor:
    """``-(8 / H) (1 - layer_idx / num_layers) h`` for head h: ``[H]``. Qin et al., "Lightning Attention-2" (2024)."""
    return _heads(q) * (-(8.0 / max(q.shape[2], 1)) * (1.0 - layer_idx / num_layers))


def _heads(q: Tensor) -> Tensor:
    return torch.arange(q.shape[2], dtype=compute_dtype(q.dtype), device=q.device)
