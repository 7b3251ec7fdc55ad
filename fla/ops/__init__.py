# SPDX-License-Identifier: MIT
"""Ops. The public functions of every op import from here, and each room loads when one of its names is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fla.ops.comba import chunk_comba, fused_recurrent_comba
    from fla.ops.delta_rule import chunk_delta_rule, fused_chunk_delta_rule, fused_recurrent_delta_rule
    from fla.ops.gated_delta_rule import (
        chunk_gated_delta_rule,
        chunk_gdn,
        fused_recurrent_gated_delta_rule,
        fused_recurrent_gdn,
    )
    from fla.ops.gla import chunk_gla, fused_chunk_gla, fused_recurrent_gla
    from fla.ops.gsa import chunk_gsa, fused_recurrent_gsa
    from fla.ops.hgrn import fused_recurrent_hgrn
    from fla.ops.kda import chunk_kda, fused_recurrent_kda
    from fla.ops.lightning_attn import chunk_lightning_attn, fused_recurrent_lightning_attn
    from fla.ops.linear_attn import chunk_linear_attn, fused_chunk_linear_attn, fused_recurrent_linear_attn
    from fla.ops.retention import chunk_retention, fused_chunk_retention, fused_recurrent_retention, parallel_retention
    from fla.ops.rwkv6 import chunk_rwkv6, fused_recurrent_rwkv6
    from fla.ops.simple_gla import (
        chunk_simple_gla,
        fused_chunk_simple_gla,
        fused_recurrent_simple_gla,
        parallel_simple_gla,
    )

_ROOMS: dict[str, tuple[str, ...]] = {
    "comba": (
        "chunk_comba",
        "fused_recurrent_comba",
    ),
    "delta_rule": (
        "chunk_delta_rule",
        "fused_chunk_delta_rule",
        "fused_recurrent_delta_rule",
    ),
    "gated_delta_rule": (
        "chunk_gated_delta_rule",
        "chunk_gdn",
        "fused_recurrent_gated_delta_rule",
        "fused_recurrent_gdn",
    ),
    "gla": (
        "chunk_gla",
        "fused_chunk_gla",
        "fused_recurrent_gla",
    ),
    "gsa": (
        "chunk_gsa",
        "fused_recurrent_gsa",
    ),
    "hgrn": ("fused_recurrent_hgrn",),
    "kda": (
        "chunk_kda",
        "fused_recurrent_kda",
    ),
    "lightning_attn": (
        "chunk_lightning_attn",
        "fused_recurrent_lightning_attn",
    ),
    "linear_attn": (
        "chunk_linear_attn",
        "fused_chunk_linear_attn",
        "fused_recurrent_linear_attn",
    ),
    "retention": (
        "chunk_retention",
        "fused_chunk_retention",
        "fused_recurrent_retention",
        "parallel_retention",
    ),
    "rwkv6": (
        "chunk_rwkv6",
        "fused_recurrent_rwkv6",
    ),
    "simple_gla": (
        "chunk_simple_gla",
        "fused_chunk_simple_gla",
        "fused_recurrent_simple_gla",
        "parallel_simple_gla",
    ),
}

# Names of release 0.6.0 whose ops do not exist here yet, by the room they will live in.
_PLANNED: dict[str, tuple[str, ...]] = {
    "abc": ("chunk_abc",),
    "attn": ("parallel_attn",),
    "attnres": ("fused_attnres",),
    "based": (
        "fused_chunk_based",
        "parallel_based",
    ),
    "cyfa": (
        "chunk_cyfa",
        "fused_recurrent_cyfa",
    ),
    "forgetting_attn": ("parallel_forgetting_attn",),
    "generalized_delta_rule": (
        "chunk_dplr_delta_rule",
        "chunk_iplr_delta_rule",
        "fused_recurrent_dplr_delta_rule",
        "fused_recurrent_iplr_delta_rule",
    ),
    "log_linear_attn": ("chunk_log_linear_attn",),
    "mesa_net": ("chunk_mesa_net",),
    "momentum_delta_rule": (
        "chunk_momentum_delta_rule",
        "fused_recurrent_momentum_delta_rule",
    ),
    "nsa": ("parallel_nsa",),
    "parallax": ("parallel_parallax",),
    "path_attn": ("parallel_path_attn",),
    "precond_gated_delta_rule": (
        "chunk_precond_gated_delta_rule",
        "fused_recurrent_precond_gated_delta_rule",
    ),
    "precond_kda": (
        "chunk_precond_kda",
        "fused_recurrent_precond_kda",
    ),
    "rwkv7": (
        "chunk_rwkv7",
        "fused_recurrent_rwkv7",
    ),
    "stickbreaking_attn": ("parallel_stickbreaking_attn",),
    "wall_attn": (
        "parallel_wall_attn",
        "parallel_wall_attn_decode",
    ),
}

_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = [
    "chunk_comba",
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_gla",
    "chunk_gsa",
    "chunk_kda",
    "chunk_lightning_attn",
    "chunk_linear_attn",
    "chunk_retention",
    "chunk_rwkv6",
    "chunk_simple_gla",
    "fused_chunk_delta_rule",
    "fused_chunk_gla",
    "fused_chunk_linear_attn",
    "fused_chunk_retention",
    "fused_chunk_simple_gla",
    "fused_recurrent_comba",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_gla",
    "fused_recurrent_gsa",
    "fused_recurrent_hgrn",
    "fused_recurrent_kda",
    "fused_recurrent_lightning_attn",
    "fused_recurrent_linear_attn",
    "fused_recurrent_retention",
    "fused_recurrent_rwkv6",
    "fused_recurrent_simple_gla",
    "parallel_retention",
    "parallel_simple_gla",
]


def __getattr__(name: str) -> Any:
    room = _ROOM_OF.get(name)
    if room is not None:
        value = globals()[name] = getattr(importlib.import_module(f"fla.ops.{room}"), name)
        return value
    for planned, names in _PLANNED.items():
        if name in names:
            raise AttributeError(f"fla.ops.{name} does not exist yet: fla.ops.{planned} is not part of this version.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
