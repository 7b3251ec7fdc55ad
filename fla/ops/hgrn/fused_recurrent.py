# SPDX-License-Identifier: MIT
"""HGRN, token by token: the form for decoding."""

from __future__ import annotations

from torch import Tensor

from fla.backends import dispatch
from fla.ops._scan.covers import covers_scan
from fla.ops.hgrn.shared import FACTS, check_hgrn, hgrn, hgrn_outputs

__all__ = ["fused_recurrent_hgrn"]


@dispatch(
    "hgrn",
    validate=check_hgrn,
    facts=FACTS,
    outputs=hgrn_outputs,
    triton="fla.ops._scan.entry:fused_recurrent_hgrn",
    triton_verifier=covers_scan,
)
def fused_recurrent_hgrn(
    x: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``h_t = exp(g_t) h_{t-1} + x_t`` and ``o_t = h_t``: arguments, gradients, results and errors as
    :func:`fla.ops.hgrn.chunk_hgrn`.

    Args:
        x: ``[B, T, D]``.
        g: log decay (natural) ``[B, T, D]``.
        initial_state: ``[N, D]``.
        output_final_state: whether to return the final state.
        cu_seqlens: boundaries of packed sequences ``[N + 1]``.

    Returns:
        ``o [B, T, D]`` in the dtype of x and the final state ``[N, D]`` (float32; float64 for float64) or None.
    """
    return hgrn(x, g, initial_state, output_final_state, cu_seqlens)
