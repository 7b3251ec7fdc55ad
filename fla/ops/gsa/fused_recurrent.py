# SPDX-License-Identifier: MIT
"""Gated slot attention, token by token: the form for decoding."""

from __future__ import annotations

from torch import Tensor

from fla.backends import dispatch
from fla.ops._linear.vector_covers import covers_gsa
from fla.ops.gsa.shared import State, check_recurrent, gsa, gsa_outputs

__all__ = ["fused_recurrent_gsa"]


@dispatch(
    "gsa",
    validate=check_recurrent,
    outputs=gsa_outputs,
    triton="fla.ops.gsa.triton_path:fused_recurrent_gsa",
    triton_verifier=covers_gsa,
)
def fused_recurrent_gsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """Gated slot attention for few tokens per sequence: arguments, gradients, results and errors as
    :func:`fla.ops.gsa.chunk_gsa`, query groups and the triple of states included.

    On devices without Triton one token is one step and more tokens go through the chunked engine.

    Args:
        q: ``[B, T, HQ, K]``.
        k: ``[B, T, H, K]``.
        v: ``[B, T, H, V]``.
        s: write weight of each slot ``[B, T, H, M]``, or its logarithm without `g`.
        g: log decay of each slot ``[B, T, H, M]``, or None.
        scale: factor of the scores; None for ``K ** -0.5``.
        initial_state: ``(hk [N, H, K, M], hv [N, H, M, V])``, without `g` also with ``z [N, 1, H, M]``.
        output_final_state: whether to return the final states.
        reverse: run each sequence from its last token to its first, the additive gate as well.
        cu_seqlens: boundaries of packed sequences ``[N + 1]``.

    Returns:
        ``o`` ``[B, T, HQ, V]`` in the dtype of q and the list of final states, as ``chunk_gsa``.
    """
    return gsa(q, k, v, s, g, scale, initial_state, output_final_state, reverse, cu_seqlens)
