# SPDX-License-Identifier: MIT
"""Inverses of unit lower triangular matrices, one per chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from fla.ops._common import checks
from fla.ops._common.gates import compute_dtype
from fla.ops._common.varlen import plan_chunks

__all__ = ["solve_tril"]


def solve_tril(
    A: Tensor,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
) -> Tensor:
    """``(I + A) ** -1`` per chunk, A strictly lower triangular. Differentiable.

    Args:
        A: rows of the matrices ``[B, T, H, C]``, C the chunk size: 16, 32 or 64. Entries on and above the diagonal are
            not read.
        cu_seqlens: boundaries of packed sequences ``[N + 1]``; B must be 1.
        chunk_indices: what a launch on a GPU may be given; without effect on the result.
        output_dtype: dtype of the result; None for that of A.

    Returns:
        Rows of the inverses ``[B, T, H, C]``, zero above the diagonal.

    Raises:
        ValueError (and AssertionError): another rank or chunk size.
    """
    sizes = checks.check_shapes(A=(A, "B T H C"))
    checks.check_choice("A.shape[-1]", sizes["C"], (16, 32, 64))
    checks.check_varlen(cu_seqlens, None, sizes["B"], sizes["T"])
    C = sizes["C"]
    plan = plan_chunks(sizes["B"], sizes["T"], C, A.device, cu_seqlens)
    lower = plan.pack(A.to(compute_dtype(A.dtype))).transpose(1, 2)  # [M, H, C, C]
    eye = torch.eye(C, dtype=lower.dtype, device=A.device)
    inverse = torch.linalg.solve_triangular(lower.tril(-1), eye.expand_as(lower), upper=False, unitriangular=True)
    return plan.unpack(inverse.transpose(1, 2)).to(output_dtype or A.dtype).contiguous()
