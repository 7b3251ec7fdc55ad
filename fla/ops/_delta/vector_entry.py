# SPDX-License-Identifier: MIT
"""KDA and GDN-2 on Triton: from the public ops' arguments to the vector-decay engine."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from fla.backends import needs_backward
from fla.ops._common.gates import needs_range
from fla.ops._common.launch import on_device
from fla.ops._common.served import served
from fla.ops._common.tape import Known, KnownCalls, look
from fla.ops._delta.vector_autograd import again, compile_ahead, infer, train
from fla.ops._delta.vector_covers import bounded_gate
from fla.ops._delta.vector_work import FEW, VectorCall, Work

_calls = KnownCalls()


def _chunk_states(work: Work, states: Tensor, chunk_size: int, cu_seqlens_cpu: Tensor | None, v_first: bool) -> Tensor:
    """States before each chunk as `[B, NT, HV, K, V]` (or V-first) from the engine's buffer of 64-token tiles."""
    p, per = work.plan, 64 // chunk_size
    chunks = work.table.chunks
    x = states.view(chunks, work.H, per, p.vp, p.kp)[..., : work.V, : work.K].transpose(1, 2)
    x = x.reshape(chunks * per, work.H, work.V, work.K)
    if work.table.varlen:
        assert work.table.cu is not None
        cu = (work.table.cu if cu_seqlens_cpu is None else cu_seqlens_cpu).tolist()
        lengths = [b - a for a, b in itertools.pairwise(cu)]
        keep: list[int] = []
        first = 0
        for n in lengths:
            keep.extend(range(first, first + -(-n // chunk_size)))
            first += -(-n // 64) * per
        x = x[torch.tensor(keep, dtype=torch.long, device=x.device)][None]
    else:
        x = x.view(work.B, -1, work.H, work.V, work.K)[:, : -(-work.T // chunk_size)]
    return (x if v_first else x.transpose(-1, -2)).contiguous()


def _run(inputs: tuple[Any, ...], known: Known, final: bool) -> Any:
    return served(train if needs_backward(inputs) else infer, inputs, known, final)


def chunk_vector(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    final: bool = False,
    *,
    norm: bool = False,
    gate_in_kernel: bool = False,
    beta_mode: int = 0,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    keep: bool = False,
    chunk_states: int = 0,
    v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    uncovered: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Outputs and final states of a rule with a decay per key channel, differentiable in every tensor.

    ``beta`` is `[B, T, HV]`, or `[B, T, HV, K]`: then it multiplies the read key alone, and ``v`` is what is written.
    ``beta_mode`` as ``VectorCall.beta``. ``chunk_states`` not 0: also the states before chunks of so many tokens.

    ``safe_gate`` with a ready ``g`` takes the promise that decays lie in [-5, 0): stronger ones are cut just below -5.
    A gate bounded by ``lower_bound >= -5`` takes the same kernels by itself; every other gate is exact at any strength.
    """
    gates = (A_log, dt_bias) if gate_in_kernel else (None, None)
    inputs: tuple[Any, ...] = (q, k, v, g, beta, *gates, initial_state, cu_seqlens)
    flags = (
        scale, final, norm, gate_in_kernel, beta_mode, safe_gate, lower_bound, keep, chunk_states, v_first, uncovered,
    )  # fmt: skip
    known = _calls.get((look(inputs), flags))
    if known is not None:
        return _run(inputs, known, final)
    gate = 0 if not gate_in_kernel else (1 if lower_bound is None else 2)
    call = VectorCall(
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        gate=gate,
        lower=0.0 if lower_bound is None else float(lower_bound),
        beta=beta_mode,
        norm=norm,
        exact=q.shape[1] < FEW or not bounded_gate(gate_in_kernel, safe_gate, lower_bound),
        v_first=v_first,
        uncovered=uncovered,
        keep=keep,
        part=int(needs_range(k.dtype)),
    )
    inputs = tuple(None if x is None else x.contiguous() for x in inputs)
    if not chunk_states or needs_backward(inputs):
        key = (look(inputs), flags)
        known = _calls.get(key)
        if known is None:
            with on_device(q):
                compile_ahead(call, inputs, final)
            known = _calls.add(key, call)
        return _run(inputs, known, final)
    q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens = inputs
    with on_device(q):
        work = Work(call, q, k, v, g, beta, A_log, dt_bias, cu_seqlens)
        work.prep(train=False)
        o = work.like(v)
        ht = work.final_state() if final else None
        per = 64 // chunk_states
        states = work.new(work.tiles_n * per * work.plan.vp, work.plan.kp)
        work.scan(initial_state, o=o, ht=ht, states=states, save=per)
        again(work, initial_state, o, ht, states, per)
        return o, ht, _chunk_states(work, states, chunk_states, cu_seqlens_cpu, v_first)


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
    """`fla.ops.kda.chunk_kda` in Triton; arguments are validated there."""
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
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        keep=disable_recompute,
        chunk_states=chunk_size if return_intermediate_states else 0,
        v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        uncovered=use_graph,
        A_log=A_log,
        dt_bias=dt_bias,
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
    """`fla.ops.gdn2.chunk_gdn2` in Triton; arguments are validated there. What is written, ``w v``, is one product in
    PyTorch, whose backward also is that of both factors."""
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
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        keep=disable_recompute,
        chunk_states=chunk_size if return_intermediate_states else 0,
        v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        A_log=A_log,
        dt_bias=dt_bias,
    )
