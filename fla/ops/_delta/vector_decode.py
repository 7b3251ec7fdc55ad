# SPDX-License-Identifier: MIT
"""Triton paths of the public ops with a decay per key channel that run token by token.

Every function has the parameters of the public op it serves; arguments have been checked there.
"""

from __future__ import annotations

from torch import Tensor

from fla.backends import needs_backward
from fla.ops._delta.decode import Gates, Pool, recurrent
from fla.ops._delta.vector_entry import chunk_vector


def _gates(
    in_kernel: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    sigmoid: bool = False,
    allow_neg_eigval: bool = False,
) -> Gates:
    beta_scale = (2.0 if allow_neg_eigval else 1.0) if sigmoid else 0.0
    return Gates(in_kernel, True, A_log, dt_bias, lower_bound, beta_scale)


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    if needs_backward((q, k, v, g, beta, A_log, dt_bias, initial_state)):
        return chunk_vector(
            q,
            k,
            v,
            g,
            beta,
            scale,
            initial_state,
            output_final_state,
            norm=use_qk_l2norm_in_kernel,
            gate_in_kernel=use_gate_in_kernel,
            beta_mode=(2 if allow_neg_eigval else 1) if use_beta_sigmoid_in_kernel else 0,
            lower_bound=lower_bound,
            v_first=state_v_first,
            cu_seqlens=cu_seqlens,
            A_log=A_log,
            dt_bias=dt_bias,
        )[:2]
    return recurrent(
        q,
        k,
        v,
        gk=g,
        beta=beta,
        gates=_gates(use_gate_in_kernel, A_log, dt_bias, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval),
        scale=scale,
        state=initial_state,
        norm=use_qk_l2norm_in_kernel,
        v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        final=output_final_state,
    )


def fused_recurrent_kda_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    output_final_state: bool = False,
    inplace_final_state: bool = True,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    return recurrent(
        q,
        k,
        v,
        gk=g,
        beta=beta,
        gates=_gates(use_gate_in_kernel, A_log, dt_bias, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval),
        scale=scale,
        state=initial_state,
        norm=use_qk_l2norm_in_kernel,
        v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        out=out,
        final=output_final_state,
        in_place=inplace_final_state,
        pool=None if ssm_state_indices is None else Pool(ssm_state_indices, num_accepted_tokens),
    )


def fused_recurrent_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    if needs_backward((q, k, v, g, b, w, A_log, dt_bias, initial_state)):
        return chunk_vector(
            q,
            k,
            (w * v).to(v.dtype),
            g,
            b,
            scale,
            initial_state,
            output_final_state,
            norm=use_qk_l2norm_in_kernel,
            gate_in_kernel=use_gate_in_kernel,
            lower_bound=lower_bound,
            v_first=state_v_first,
            cu_seqlens=cu_seqlens,
            A_log=A_log,
            dt_bias=dt_bias,
        )[:2]
    return recurrent(
        q,
        k,
        v,
        gk=g,
        gates=_gates(use_gate_in_kernel, A_log, dt_bias, lower_bound),
        scale=scale,
        state=initial_state,
        norm=use_qk_l2norm_in_kernel,
        v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        final=output_final_state,
        erase=b,
        gain=w,
    )


def fused_recurrent_gdn2_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    output_final_state: bool = False,
    inplace_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    return recurrent(
        q,
        k,
        v,
        gk=g,
        gates=_gates(use_gate_in_kernel, A_log, dt_bias, lower_bound),
        scale=scale,
        state=initial_state,
        norm=use_qk_l2norm_in_kernel,
        v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        out=out,
        final=output_final_state,
        in_place=inplace_final_state,
        pool=None if ssm_state_indices is None else Pool(ssm_state_indices, num_accepted_tokens),
        erase=b,
        gain=w,
    )
