# SPDX-License-Identifier: MIT
"""Comba, chunked."""

from __future__ import annotations

from torch import Tensor

from fla.ops._common.gates import to_output
from fla.ops._delta.covers import covers_chunk_delta
from fla.ops._delta.op import delta_op
from fla.ops._delta.outputs import k_first_outputs
from fla.ops._delta.rows import COMBA
from fla.ops._delta.torch_chunk import chunk_delta, fitting_chunk
from fla.ops.comba.inputs import check_read_key, comba_operands


@delta_op(
    COMBA,
    {"g": "B T HV", "beta": "B T HV"},
    check=check_read_key,
    outputs=k_first_outputs,
    triton="fla.ops._delta.entry:chunk_comba",
    triton_verifier=covers_chunk_delta,
)
def chunk_comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Comba: a gated delta rule that reads with a key of its own, and before the state decays.

    Per value head, with state ``S [K, V]``::

        S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - S_{t-1}^T p_t)^T
        o_t = scale * S_t^T q_t

    Differentiable in every tensor, through outputs and final states. Keys are expected normalised (see
    ``use_qk_l2norm_in_kernel``); the rule diverges for long keys. With ``p_t = exp(g_t) k_t`` it is the gated delta
    rule.

    Args:
        q: queries ``[B, T, H, K]``; q, k, v share one of float16, bfloat16, float32, float64.
        k: write keys ``[B, T, H, K]``.
        v: values ``[B, T, HV, V]``; ``HV`` a multiple of ``H``, value head ``i`` uses query head ``i // (HV / H)``.
        p: read keys ``[B, T, H, K]``, any floating dtype; ``k`` if None.
        g: log decay in natural logarithm, ``[B, T, HV]``, at most 0.
        beta: write strength ``[B, T, HV]``; ones if None.
        scale: factor of the outputs; ``K ** -0.5`` if None.
        initial_state: ``[N, HV, K, V]``, any floating dtype; zeros if None. ``N`` is ``B`` or the number of sequences.
        output_final_state: return the final states.
        use_qk_l2norm_in_kernel: divide q, k and p by ``sqrt(sum(x^2) + 1e-6)`` first.
        cu_seqlens: offsets ``[N + 1]`` of sequences packed into one row (``B = 1``), int32 or int64.
        cu_seqlens_cpu: the same on the CPU, which saves a device copy.

    Returns:
        ``o [B, T, HV, V]`` in the dtype of q and the final states (float32, float64 for float64 inputs) or None.

    Raises:
        ArgumentError: (ValueError and AssertionError) wrong shapes, devices, offsets, states.
        DtypeError: (also TypeError) wrong or mixed dtypes.

    Source: Hu et al., "Comba: Improving Bilinear RNNs with Closed-loop Control" (2025).
    """
    row, x = comba_operands(q, k, v, p, g, beta, use_qk_l2norm_in_kernel)
    o, final, _ = chunk_delta(
        row,
        x,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        chunk_size=fitting_chunk(q.shape[1], cu_seqlens, cu_seqlens_cpu),
    )
    return to_output(o, q.dtype), final if output_final_state else None


__all__ = ["chunk_comba"]
