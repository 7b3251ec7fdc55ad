# SPDX-License-Identifier: MIT
"""Triton paths of the public ops with scalar or no decay, and of all that run token by token.

Every function has the parameters of the public op it serves; arguments have been checked there. `covers` says which
calls come here; the others run in PyTorch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fla.backends import needs_backward
from fla.ops._delta.autograd import delta_rule
from fla.ops._delta.decode import Gates, recurrent


def _beta_scale(sigmoid: bool, allow_neg_eigval: bool) -> float:
    return (2.0 if allow_neg_eigval else 1.0) if sigmoid else 0.0


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
    return delta_rule(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        norm=use_qk_l2norm_in_kernel,
        beta_scale=_beta_scale(use_beta_sigmoid_in_kernel, allow_neg_eigval),
        A_log=A_log if use_gate_in_kernel else None,
        dt_bias=dt_bias if use_gate_in_kernel else None,
        v_first=state_v_first,
        cu_seqlens=cu_seqlens,
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
    return delta_rule(
        q,
        k,
        v,
        None,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        norm=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
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
    return delta_rule(
        q,
        k,
        v,
        g,
        torch.ones_like(g) if beta is None else beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        norm=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        read=None if p is None else p.to(k.dtype),
        before=True,
    )


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    beta_scale = _beta_scale(use_beta_sigmoid_in_kernel, allow_neg_eigval)
    if needs_backward((q, k, v, g, beta, initial_state, A_log, dt_bias)):
        assert beta is not None
        o, final = delta_rule(
            q,
            k,
            v,
            g,
            beta,
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            norm=use_qk_l2norm_in_kernel,
            beta_scale=beta_scale,
            A_log=A_log if use_gate_in_kernel else None,
            dt_bias=dt_bias if use_gate_in_kernel else None,
            v_first=state_v_first,
            cu_seqlens=cu_seqlens,
        )
        return o, final
    gates = Gates(use_gate_in_kernel, False, A_log, dt_bias, None, beta_scale)
    return recurrent(
        q,
        k,
        v,
        g=g,
        gk=gk,
        gv=gv,
        beta=beta,
        gates=gates,
        scale=scale,
        state=initial_state,
        norm=use_qk_l2norm_in_kernel,
        v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        final=output_final_state,
    )


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    return fused_recurrent_gated_delta_rule(
        q,
        k,
        v,
        beta=beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )


def fused_recurrent_comba(
    q: Tensor,
    k: Tensor,
    p: Tensor | None,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    if needs_backward((q, k, p, v, g, beta, initial_state)):
        return chunk_comba(
            q,
            k,
            v,
            p,
            g,
            beta,
            scale,
            initial_state,
            output_final_state,
            use_qk_l2norm_in_kernel,
            cu_seqlens,
        )
    return recurrent(
        q,
        k,
        v,
        g=g,
        beta=beta,
        scale=scale,
        state=initial_state,
        norm=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        final=output_final_state,
        read=p,
        before=True,
    )
