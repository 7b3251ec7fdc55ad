# SPDX-License-Identifier: MIT
"""What the parallel forms of the family share: the check and the outputs of ``output_attentions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fla.ops._common.checks import ArgumentError

__all__ = ["attention_outputs", "check_attentions"]


def check_attentions(values: Mapping[str, Any]) -> None:
    """Scores exist for dense batches only."""
    if values.get("output_attentions") and values.get("cu_seqlens") is not None:
        raise ArgumentError(
            "output_attentions=True and `cu_seqlens` exclude each other: there is no packed score matrix."
        )


def attention_outputs(values: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Empty ``(o, attn)`` of a call."""
    q, v = values["q"], values["v"]
    B, T, H = q.shape[:3]
    return v.new_empty(v.shape, dtype=q.dtype), q.new_empty(B, H, T, T) if values.get("output_attentions") else None
