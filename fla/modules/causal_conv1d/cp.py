# SPDX-License-Identifier: MIT
"""The short convolution over a sequence that is shared by ranks: a name of the reference package, not there yet."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fla.ops._common.checks import ArgumentError

__all__ = ["CausalConv1dFunctionCP", "causal_conv1d_cp"]


def causal_conv1d_cp(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    chunk_size: int | None = None,
    backend: str = "triton",
    residual: Tensor | None = None,
) -> Tensor:
    """Not supported yet.

    Raises:
        ArgumentError: no ``cp_context``.
        NotImplementedError: otherwise.
    """
    if cp_context is None:
        raise ArgumentError("`cp_context` must be given, got None: without ranks to share with, use causal_conv1d.")
    raise NotImplementedError("causal_conv1d_cp: context parallelism is not supported yet.")


class CausalConv1dFunctionCP:
    """``apply`` of the reference package's class: :func:`causal_conv1d_cp`, not supported yet."""

    apply = staticmethod(causal_conv1d_cp)
