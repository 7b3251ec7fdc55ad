# SPDX-License-Identifier: MIT
"""Triton paths of the ops on the elementwise scan: the parameters of the public ops, arguments checked there."""

from __future__ import annotations

from torch import Tensor

from fla.ops._scan.autograd import scan


def chunk_hgrn(
    x: Tensor, g: Tensor, initial_state: Tensor | None = None, output_final_state: bool = False, *,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    return scan(x, g, initial_state, output_final_state, cu_seqlens)


def fused_recurrent_hgrn(
    x: Tensor, g: Tensor, initial_state: Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    return scan(x, g, initial_state, output_final_state, cu_seqlens)
