# SPDX-License-Identifier: MIT
"""Gated slot attention, chunked."""

from __future__ import annotations

from torch import Tensor

from fla.backends import dispatch
from fla.ops._linear.op import HEAD_FIRST
from fla.ops._linear.vector_covers import covers_gsa
from fla.ops.gsa.shared import State, check_chunk, gsa, gsa_outputs

__all__ = ["chunk_gsa"]


@dispatch(
    "gsa",
    validate=check_chunk,
    outputs=gsa_outputs,
    removed=HEAD_FIRST,
    triton="fla.ops.gsa.triton_path:chunk_gsa",
    triton_verifier=covers_gsa,
)
def chunk_gsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    output_final_state: bool = False,
    checkpoint_level: int = 2,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """Gated slot attention: ``M`` memory slots per head, written by a gate and read by softmax.

    Per head, with slots of keys ``Hk [K, M]`` and of values ``Hv [M, V]``::

        Hk_t = Hk_{t-1} diag(exp(g_t)) + k_t (x) s_t
        Hv_t = diag(exp(g_t)) Hv_{t-1} + s_t (x) v_t
        o_t  = softmax(scale q_t Hk_t) Hv_t

    Differentiable in every tensor, through outputs and final states.

    Args:
        q: ``[B, T, HQ, K]``; float16, bfloat16, float32 or float64, one dtype for q, k and v. ``HQ`` is a multiple of
            ``H``, query head ``i`` reads the slots of head ``i // (HQ / H)``.
        k: ``[B, T, H, K]``.
        v: ``[B, T, H, V]``.
        s: write weight of each slot ``[B, T, H, M]``, any float; without `g` its logarithm, not normalised.
        g: log decay of each slot (natural logarithm, normally <= 0) ``[B, T, H, M]``, any float; None to take weights
            and decays from `s` by :func:`fla.ops.gsa.gate.fused_additive_gate`.
        scale: factor of the scores; None for ``K ** -0.5``.
        initial_state: pair ``(hk [N, H, K, M], hv [N, H, M, V])``, any float; None, or either None, for zero. Without
            `g` also a triple ``(hk, hv, z [N, 1, H, M])`` with the normaliser of the additive gate (None: nothing seen
            yet), which lets a run go on where another one ended. N is B, or the number of packed sequences.
        output_final_state: whether to return the states after the last token.
        checkpoint_level: 0, 1 or 2, how much the backward pass computes again; a hint.
        cu_seqlens: boundaries of packed sequences ``[N + 1]``, int32 or int64, from 0 to T; B must be 1.
        cu_seqlens_cpu: their copy on the CPU, which saves waiting for the device.
        chunk_size: 16, 32, 64 or 128; accepted, results do not depend on it.

    Returns:
        ``o`` ``[B, T, HQ, V]`` in the dtype of q, and the list ``[hk, hv]`` of final states (float32; float64 for
        float64), ``[hk, hv, z]`` if `initial_state` is a triple; each None if not asked for.

    Raises:
        ArgumentError: (ValueError and AssertionError) shapes, devices, states or `cu_seqlens` that do not fit.
        DtypeError: (also TypeError) dtypes that do not fit.

    Source: Zhang et al., "Gated Slot Attention for Efficient Linear-Time Sequence Modeling" (2024), section 3.
    """
    return gsa(
        q,
        k,
        v,
        s,
        g,
        scale,
        initial_state,
        output_final_state,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
    )
