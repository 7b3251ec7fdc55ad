# SPDX-License-Identifier: MIT
"""Triton paths of the public ops with decays per channel.

Every function has the parameters of the public op it serves; arguments have been checked there. `vector_covers` says
which calls may come here.
"""

from __future__ import annotations

from torch import Tensor

from fla.ops._common.launch import on_device
from fla.ops._common.tape import refuse_transforms
from fla.ops._linear.autograd import scalar_linear
from fla.ops._linear.vector_autograd import vector_linear
from fla.ops._linear.vector_covers import goes_token_by_token
from fla.ops._linear.vector_decode import recurrent

Result = tuple[Tensor, Tensor | None]


def chunk_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> Result:  # fmt: skip
    return vector_linear(
        q, k, v, gk=g, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        state_v_first=state_v_first, cu_seqlens=cu_seqlens,
    )  # fmt: skip


def fused_recurrent_gla(
    q: Tensor, k: Tensor, v: Tensor, gk: Tensor | None = None, gv: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, reverse: bool = False,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    if goes_token_by_token(q.shape[1], q, k, v, gk, gv, initial_state):
        return tokens(
            q, k, v, gk, gv, None, scale, initial_state, output_final_state, reverse, state_v_first, cu_seqlens
        )  # fmt: skip
    if gk is None and gv is None:
        return scalar_linear(
            q, k, v, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
            state_v_first=state_v_first, cu_seqlens=cu_seqlens,
        )  # fmt: skip
    return vector_linear(
        q, k, v, gk=gk, gv=gv, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        reverse=reverse, state_v_first=state_v_first, cu_seqlens=cu_seqlens,
    )  # fmt: skip


def chunk_rwkv6(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, *, chunk_size: int | None = None,
) -> Result:  # fmt: skip
    return vector_linear(
        r, k, v, gk=w, bonus=u, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip


def fused_recurrent_rwkv6(
    r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:  # fmt: skip
    if goes_token_by_token(r.shape[1], r, k, v, w, u, initial_state):
        return tokens(r, k, v, w, None, u, scale, initial_state, output_final_state, reverse, False, cu_seqlens)
    return vector_linear(
        r, k, v, gk=w, bonus=u, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        reverse=reverse, cu_seqlens=cu_seqlens,
    )  # fmt: skip


def tokens(
    q: Tensor, k: Tensor, v: Tensor, gk: Tensor | None, gv: Tensor | None, bonus: Tensor | None, scale: float | None,
    state: Tensor | None, final: bool, reverse: bool, v_first: bool, cu_seqlens: Tensor | None,
) -> Result:  # fmt: skip
    """One launch token by token; any strides."""
    refuse_transforms((q, k, v, gk, gv, bonus, state))
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    gk, gv, bonus, state, cu_seqlens = (
        None if x is None else x.contiguous() for x in (gk, gv, bonus, state, cu_seqlens)
    )
    with on_device(q):
        return recurrent(
            q, k, v, gk=gk, gv=gv, bonus=bonus, scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
            state=state, final=final, reverse=reverse, v_first=v_first, cu_seqlens=cu_seqlens,
        )  # fmt: skip
