# SPDX-License-Identifier: MIT
"""Delta rule, chunked."""

from __future__ import annotations

from torch import Tensor

from fla.ops._common.gates import to_output
from fla.ops._delta.covers import covers_chunk_delta
from fla.ops._delta.op import HEAD_FIRST, delta_op
from fla.ops._delta.outputs import k_first_outputs
from fla.ops._delta.rows import DELTA_RULE
from fla.ops._delta.torch_chunk import chunk_delta, fitting_chunk
from fla.ops._delta.torch_inputs import activate


@delta_op(
    DELTA_RULE,
    {"beta": "B T H"},
    chunk_sizes=(16, 32, 64),
    grouped=False,
    outputs=k_first_outputs,
    removed=HEAD_FIRST,
    triton="fla.ops._delta.entry:chunk_delta_rule",
    triton_verifier=covers_chunk_delta,
)
def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """Delta rule: linear attention that overwrites what a key already holds.

    Per head, with state ``S [K, V]``::

        S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T
        o_t = scale * S_t^T q_t

    Differentiable in every tensor, through outputs and final states. Keys are expected normalised (see
    ``use_qk_l2norm_in_kernel``); the rule diverges for long keys.

    Args:
        q: queries ``[B, T, H, K]``; q, k, v share one of float16, bfloat16, float32, float64.
        k: keys ``[B, T, H, K]``.
        v: values ``[B, T, H, V]``.
        beta: write strength ``[B, T, H]``.
        scale: factor of the outputs; ``K ** -0.5`` if None.
        initial_state: ``[N, H, K, V]``, any floating dtype; zeros if None. ``N`` is ``B`` or the number of sequences.
        output_final_state: return the final states.
        use_qk_l2norm_in_kernel: divide q and k by ``sqrt(sum(x^2) + 1e-6)`` first.
        cu_seqlens: offsets ``[N + 1]`` of sequences packed into one row (``B = 1``), int32 or int64.
        cu_seqlens_cpu: the same on the CPU, which saves a device copy.
        chunk_size: 16, 32 or 64; results do not depend on it.

    Returns:
        ``o [B, T, H, V]`` in the dtype of q and the final states (float32, float64 for float64 inputs) or None.

    Raises:
        ArgumentError: (ValueError and AssertionError) wrong shapes, devices, offsets, states.
        DtypeError: (also TypeError) wrong or mixed dtypes.

    Source: Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (2024).
    """
    o, final, _ = chunk_delta(
        DELTA_RULE,
        activate(DELTA_RULE, q, k, v, None, beta, l2norm=use_qk_l2norm_in_kernel),
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        chunk_size=fitting_chunk(q.shape[1], cu_seqlens, cu_seqlens_cpu),
    )
    return to_output(o, q.dtype), final if output_final_state else None


__all__ = ["chunk_delta_rule"]
