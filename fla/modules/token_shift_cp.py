# SPDX-License-Identifier: MIT
"""Token shift over a sequence that is shared by ranks: a name of the reference package, not there yet."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fla.ops._common.checks import ArgumentError

__all__ = ["token_shift_cp"]


def token_shift_cp(
    x: Tensor, cp_context: Any, cu_seqlens: Tensor | None = None, chunk_indices: Tensor | None = None
) -> Tensor:
    """Not supported yet.

    Raises:
        ArgumentError: no ``cp_context``.
        NotImplementedError: otherwise.
    """
    if cp_context is None:
        raise ArgumentError("`cp_context` must be given, got None: without ranks to share with, use token_shift.")
    raise NotImplementedError("token_shift_cp: context parallelism is not supported yet.")
