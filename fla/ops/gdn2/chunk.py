# SPDX-License-Identifier: MIT
"""GDN-2, chunked."""

from __future__ import annotations

from torch import Tensor

from fla.ops._common import checks
from fla.ops._common.gates import to_output
from fla.ops._delta.op import HEAD_FIRST, STATE_LAYOUT, Sizes, Values, delta_op
from fla.ops._delta.outputs import chunk_outputs
from fla.ops._delta.rows import GDN2
from fla.ops._delta.torch_chunk import chunk_delta, fitting_chunk
from fla.ops._delta.torch_inputs import activate
from fla.ops._delta.validate import check_intermediate_states, check_safe_gate
from fla.ops._delta.vector_covers import covers_chunk_delta

SHAPES = {"g": "B T HV K", "b": "B T HV K", "w": "B T HV V"}


def _check(values: Values, sizes: Sizes) -> None:
    check_safe_gate(values["safe_gate"], values["use_gate_in_kernel"], values["lower_bound"])
    checks.check_no_cp(values["cp_context"])
    check_intermediate_states(values["return_intermediate_states"], values["disable_recompute"])


@delta_op(
    GDN2,
    SHAPES,
    chunk_sizes=(64,),
    check=_check,
    outputs=chunk_outputs,
    renamed=STATE_LAYOUT,
    removed=HEAD_FIRST,
    triton="fla.ops._delta.vector_entry:chunk_gdn2",
    triton_verifier=covers_chunk_delta,
)
def chunk_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cp_context: object | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """GDN-2: a delta rule that decays and erases per key channel and writes per value channel.

    Per value head, with state ``S [K, V]``::

        S_t = diag(exp(g_t)) S_{t-1}
        S_t = S_t + k_t (w_t * v_t - S_t^T (b_t * k_t))^T
        o_t = scale * S_t^T q_t

    Differentiable in every tensor, through outputs and final states. Keys are expected normalised (see
    ``use_qk_l2norm_in_kernel``); the rule diverges for long keys. With ``b = w = beta`` in all channels it is Kimi
    Delta Attention.

    Args:
        q: queries ``[B, T, H, K]``; q, k, v share one of float16, bfloat16, float32, float64.
        k: keys ``[B, T, H, K]``.
        v: values ``[B, T, HV, V]``; ``HV`` a multiple of ``H``, value head ``i`` uses query head ``i // (HV / H)``.
        g: log decay in natural logarithm, ``[B, T, HV, K]``, at most 0; the raw gate with ``use_gate_in_kernel``.
        b: erase gate ``[B, T, HV, K]``, usually in [0, 2].
        w: write gate ``[B, T, HV, V]``.
        scale: factor of the outputs; ``K ** -0.5`` if None.
        initial_state: ``[N, HV, K, V]``, any floating dtype; zeros if None. ``N`` is ``B`` or the number of sequences.
        output_final_state: return the final states.
        use_qk_l2norm_in_kernel: divide q and k by ``sqrt(sum(x^2) + 1e-6)`` first.
        use_gate_in_kernel: compute the decay from ``g``: ``-exp(A_log) * softplus(g + dt_bias)``, or with
            ``lower_bound`` ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``.
        cu_seqlens: offsets ``[N + 1]`` of sequences packed into one row (``B = 1``), int32 or int64.
        cu_seqlens_cpu: the same on the CPU, which saves a device copy.
        safe_gate: promise that decays are in [-5, 0), which kernels may exploit; checked against ``lower_bound``.
        lower_bound: lowest decay of the bounded gate, negative.
        disable_recompute: keep intermediates for the backward pass; a hint.
        return_intermediate_states: also return the state before every chunk; needs inference mode.
        state_v_first: states are ``[N, HV, V, K]``.
        cp_context: context parallelism; not supported yet.
        A_log: logarithm of the decay rate, ``HV`` elements.
        dt_bias: gate bias, ``HV * K`` elements.
        chunk_size: 64.

    Returns:
        ``o [B, T, HV, V]`` in the dtype of q and the final states (float32, float64 for float64 inputs) or None. With
        ``return_intermediate_states`` also the states before chunks ``[B, NT, HV, K, V]`` in the dtype of k (packed
        sequences: ``B = 1`` and all their chunks).

    Raises:
        ArgumentError: (ValueError and AssertionError) wrong shapes, devices, offsets, states, flags.
        DtypeError: (also TypeError) wrong or mixed dtypes.
        NotImplementedError: ``cp_context`` given.

    The rule is that of Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024), with gates per channel.
    """
    x = activate(
        GDN2,
        q,
        k,
        v,
        g,
        l2norm=use_qk_l2norm_in_kernel,
        gate=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        b=b,
        w=w,
    )
    o, final, h = chunk_delta(
        GDN2,
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


__all__ = ["chunk_gdn2"]
