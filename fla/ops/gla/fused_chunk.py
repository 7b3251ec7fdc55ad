# SPDX-License-Identifier: MIT
"""A name that 0.6.0 keeps for gated linear attention without an implementation behind it."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["fused_chunk_gla"]


def fused_chunk_gla(
    *,
    q: Any = None,
    k: Any = None,
    v: Any = None,
    g: Any = None,
    scale: Any = None,
    initial_state: Any = None,
    output_final_state: Any = False,
    cu_seqlens: Any = None,
) -> NoReturn:
    """Not an op: raises NotImplementedError. Call :func:`fla.ops.gla.chunk_gla`."""
    raise NotImplementedError("fused_chunk_gla has no implementation: call chunk_gla, which takes the same arguments.")
