# SPDX-License-Identifier: MIT
"""Gated delta rule, chunked."""

from __future__ import annotations

from torch import Tensor

from fla.ops._common import checks
from fla.ops._common.gates import to_output
from fla.ops._delta.covers import covers_chunk_delta
from fla.ops._delta.op import HEAD_FIRST, STATE_LAYOUT, Sizes, Values, delta_op
from fla.ops._delta.outputs import recurrent_outputs
from fla.ops._delta.rows import GATED_DELTA_RULE
from fla.ops._delta.torch_chunk import chunk_delta, fitting_chunk
from fla.ops._delta.torch_inputs import activate


def _check(values: Values, sizes: Sizes) -> None:
    checks.check_no_cp(values["cp_context"])


@delta_op(
    GATED_DELTA_RULE,
    {"g": "B T HV", "beta": "B T HV"},
    chunk_sizes=(16, 32, 64),
    check=_check,
    outputs=recurrent_outputs,
    renamed=STATE_LAYOUT,
    removed=HEAD_FIRST,
    triton="fla.ops._delta.entry:chunk_gated_delta_rule",
    triton_verifier=covers_chunk_delta,
)
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule (GDN): a delta rule whose state decays by one factor per head and token.

    Per value head, with state ``S [K, V]``::

        S_t = exp(g_t) S_{t-1}
        S_t = S_t + beta_t k_t (v_t - S_t^T k_t)^T
        o_t = scale * S_t^T q_t

    Differentiable in every tensor, through outputs and final states. Keys are expected normalised (see
    ``use_qk_l2norm_in_kernel``); the rule diverges for long keys.

    Args:
        q: queries ``[B, T, H, K]``; q, k, v share one of float16, bfloat16, float32, float64.
        k: keys ``[B, T, H, K]``.
        v: values ``[B, T, HV, V]``; ``HV`` a multiple of ``H``, value head ``i`` uses query head ``i // (HV / H)``.
        g: log decay in natural logarithm, ``[B, T, HV]``, at most 0; the raw gate with ``use_gate_in_kernel``.
        beta: write strength ``[B, T, HV]``; before the sigmoid with ``use_beta_sigmoid_in_kernel``.
        scale: factor of the outputs; ``K ** -0.5`` if None.
        initial_state: ``[N, HV, K, V]``, any floating dtype; zeros if None. ``N`` is ``B`` or the number of sequences.
        output_final_state: return the final states.
        use_qk_l2norm_in_kernel: divide q and k by ``sqrt(sum(x^2) + 1e-6)`` first.
        use_beta_sigmoid_in_kernel: use ``sigmoid(beta)``.
        allow_neg_eigval: use ``2 * sigmoid(beta)``.
        state_v_first: states are ``[N, HV, V, K]``.
        cu_seqlens: offsets ``[N + 1]`` of sequences packed into one row (``B = 1``), int32 or int64.
        cu_seqlens_cpu: the same on the CPU, which saves a device copy.
        chunk_indices: accepted; the chunks follow from ``cu_seqlens``.
        cp_context: context parallelism; not supported yet.
        use_gate_in_kernel: the decay is ``-exp(A_log) * softplus(g + dt_bias)``.
        A_log: logarithm of the decay rate, ``HV`` elements.
        dt_bias: gate bias, ``HV`` elements.
        chunk_size: 16, 32 or 64; results do not depend on it.

    Returns:
        ``o [B, T, HV, V]`` in the dtype of q and the final states (float32, float64 for float64 inputs) or None.

    Raises:
        ArgumentError: (ValueError and AssertionError) wrong shapes, devices, offsets, states, flags.
        DtypeError: (also TypeError) wrong or mixed dtypes.
        NotImplementedError: ``cp_context`` given.

    Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024), section 3.
    """
    x = activate(
        GATED_DELTA_RULE,
        q,
        k,
        v,
        g,
        beta,
        l2norm=use_qk_l2norm_in_kernel,
        gate=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        sigmoid=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
    )
    o, final, _ = chunk_delta(
        GATED_DELTA_RULE,
        x,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        initial_state=initial_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        chunk_size=fitting_chunk(q.shape[1], cu_seqlens, cu_seqlens_cpu),
    )
    return to_output(o, q.dtype), final if output_final_state else None


chunk_gdn = chunk_gated_delta_rule

__all__ = ["chunk_gated_delta_rule", "chunk_gdn"]
