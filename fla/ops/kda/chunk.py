# SPDX-License-Identifier: MIT
"""Kimi Delta Attention, chunked."""

from __future__ import annotations

from torch import Tensor

from fla.ops._common import checks
from fla.ops._common.gates import to_output
from fla.ops._delta.op import HEAD_FIRST, STATE_LAYOUT, Sizes, Values, delta_op
from fla.ops._delta.outputs import chunk_outputs
from fla.ops._delta.rows import KDA
from fla.ops._delta.torch_chunk import chunk_delta, fitting_chunk
from fla.ops._delta.torch_inputs import activate
from fla.ops._delta.validate import check_graph, check_intermediate_states, check_safe_gate
from fla.ops._delta.vector_covers import covers_chunk_delta


def _check(values: Values, sizes: Sizes) -> None:
    check_safe_gate(values["safe_gate"], values["use_gate_in_kernel"], values["lower_bound"])
    checks.check_no_cp(values["cp_context"])
    check_graph(values["use_graph"], values["max_num_seqs"], values["cu_seqlens"])
    check_intermediate_states(values["return_intermediate_states"], values["disable_recompute"])


@delta_op(
    KDA,
    {"g": "B T HV K", "beta": "B T HV"},
    chunk_sizes=(32, 64),
    check=_check,
    outputs=chunk_outputs,
    renamed=STATE_LAYOUT,
    removed=HEAD_FIRST,
    triton="fla.ops._delta.vector_entry:chunk_kda",
    triton_verifier=covers_chunk_delta,
)
def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: object | None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Kimi Delta Attention: a gated delta rule whose state decays per key channel.

    Per value head, with state ``S [K, V]``::

        S_t = diag(exp(g_t)) S_{t-1}
        S_t = S_t + beta_t k_t (v_t - S_t^T k_t)^T
        o_t = scale * S_t^T q_t

    Differentiable in every tensor, through outputs and final states. Keys are expected normalised (see
    ``use_qk_l2norm_in_kernel``); the rule diverges for long keys.

    Args:
        q: queries ``[B, T, H, K]``; q, k, v share one of float16, bfloat16, float32, float64.
        k: keys ``[B, T, H, K]``.
        v: values ``[B, T, HV, V]``; ``HV`` a multiple of ``H``, value head ``i`` uses query head ``i // (HV / H)``.
        g: log decay in natural logarithm, ``[B, T, HV, K]``, at most 0; the raw gate with ``use_gate_in_kernel``.
        beta: write strength ``[B, T, HV]``; before the sigmoid with ``use_beta_sigmoid_in_kernel``.
        scale: factor of the outputs; ``K ** -0.5`` if None.
        initial_state: ``[N, HV, K, V]``, any floating dtype; zeros if None. ``N`` is ``B`` or the number of sequences.
        output_final_state: return the final states.
        use_qk_l2norm_in_kernel: divide q and k by ``sqrt(sum(x^2) + 1e-6)`` first.
        use_gate_in_kernel: compute the decay from ``g``: ``-exp(A_log) * softplus(g + dt_bias)``, or with
            ``lower_bound`` ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``.
        use_beta_sigmoid_in_kernel: use ``sigmoid(beta)``.
        allow_neg_eigval: use ``2 * sigmoid(beta)``.
        safe_gate: promise that decays are in [-5, 0), which kernels may exploit; checked against ``lower_bound``.
        lower_bound: lowest decay of the bounded gate, negative.
        disable_recompute: keep intermediates for the backward pass; a hint.
        return_intermediate_states: also return the state before every chunk; needs inference mode.
        state_v_first: states are ``[N, HV, V, K]``.
        cu_seqlens: offsets ``[N + 1]`` of sequences packed into one row (``B = 1``), int32 or int64.
        cu_seqlens_cpu: the same on the CPU, which saves a device copy.
        cp_context: context parallelism; not supported yet.
        use_graph: fixed shapes for graph capture: ``cu_seqlens`` may end before ``T``, and the remaining outputs are 0.
        max_num_seqs: with ``use_graph``, the number of sequences that ``cu_seqlens`` always has.
        A_log: logarithm of the decay rate, ``HV`` elements of any shape.
        dt_bias: gate bias, ``HV * K`` elements, head by head.
        chunk_size: 32 or 64, the chunks of ``return_intermediate_states``.

    Returns:
        ``o [B, T, HV, V]`` in the dtype of q and the final states (float32, float64 for float64 inputs) or None; with
        ``return_intermediate_states`` also ``h [B, NT, HV, K, V]`` in the dtype of k (packed: ``[1, chunks, HV, K,
        V]``).

    Raises:
        ArgumentError: (ValueError and AssertionError) wrong shapes, devices, offsets, states, flags.
        DtypeError: (also TypeError) wrong or mixed dtypes.
        NotImplementedError: ``cp_context`` given.

    Source: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture" (2025), section 3.
    """
    x = activate(
        KDA,
        q,
        k,
        v,
        g,
        beta,
        l2norm=use_qk_l2norm_in_kernel,
        gate=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        sigmoid=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
    )
    o, final, h = chunk_delta(
        KDA,
        x,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        initial_state=initial_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        chunk_size=chunk_size if return_intermediate_states else fitting_chunk(q.shape[1], cu_seqlens, cu_seqlens_cpu),
    )
    o = to_output(o, q.dtype)
    last = final if output_final_state else None
    return (o, last, h.to(k.dtype)) if return_intermediate_states else (o, last)


__all__ = ["chunk_kda"]
