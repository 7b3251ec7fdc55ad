# SPDX-License-Identifier: MIT
"""HGRN, chunked."""

from __future__ import annotations

from torch import Tensor

from fla.backends import dispatch
from fla.ops._scan.covers import covers_scan
from fla.ops.hgrn.shared import FACTS, check_hgrn, hgrn, hgrn_outputs

__all__ = ["chunk_hgrn"]


@dispatch(
    "hgrn",
    validate=check_hgrn,
    facts=FACTS,
    outputs=hgrn_outputs,
    triton="fla.ops._scan.entry:chunk_hgrn",
    triton_verifier=covers_scan,
)
def chunk_hgrn(
    x: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    *,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Elementwise recurrence ``h_t = exp(g_t) h_{t-1} + x_t`` with outputs ``o_t = h_t``.

    There is no factor ``1 - exp(g_t)`` inside: a caller who wants one multiplies ``x`` by it. Differentiable in every
    tensor, through outputs and final states.

    Args:
        x: inputs ``[B, T, D]``; float16, bfloat16, float32 or float64.
        g: log decay (natural logarithm, normally <= 0; minus infinity forgets the channel) ``[B, T, D]``, any float.
        initial_state: state before the first token ``[N, D]``, any float; None for zero. N is B, or the number of
            packed sequences.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: boundaries of packed sequences ``[N + 1]``, int32 or int64, from 0 to T; B must be 1. (The form of
            this name in release 0.6.0 of the reference package has no packed mode.)

    Returns:
        ``o [B, T, D]`` in the dtype of x, and the final state ``[N, D]`` (float32; float64 for float64) or None.

    Raises:
        ArgumentError: (ValueError and AssertionError) shapes, devices, states or `cu_seqlens` that do not fit.
        DtypeError: (also TypeError) wrong dtypes.

    Source: Qin et al., "Hierarchically Gated Recurrent Neural Network for Sequence Modeling" (2023).
    """
    return hgrn(x, g, initial_state, output_final_state, cu_seqlens)
