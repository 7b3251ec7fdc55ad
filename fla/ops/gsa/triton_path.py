# SPDX-License-Identifier: MIT
"""Gated slot attention on the Triton kernels of the linear engine; arguments have been checked by the public ops."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fla.ops._common.gates import without_autocast
from fla.ops._common.launch import on_device
from fla.ops._common.tape import refuse_transforms
from fla.ops._linear.vector_autograd import vector_linear
from fla.ops._linear.vector_covers import goes_token_by_token
from fla.ops._linear.vector_decode import slots
from fla.ops.gsa.shared import State, _gate, _repeat

# Elements of each state that one program of the decoding kernel may hold.
MOST = 128 * 128


def chunk_gsa(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, g: Tensor | None = None, scale: float | None = None,
    initial_state: State | None = None, output_final_state: bool = False, checkpoint_level: int = 2,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, *, chunk_size: int | None = None,
) -> tuple[Tensor, list[Tensor | None]]:  # fmt: skip
    return _gsa(q, k, v, s, g, scale, initial_state, output_final_state, False, cu_seqlens)


def fused_recurrent_gsa(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, g: Tensor | None = None, scale: float | None = None,
    initial_state: State | None = None, output_final_state: bool = False, reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, list[Tensor | None]]:  # fmt: skip
    return _gsa(q, k, v, s, g, scale, initial_state, output_final_state, reverse, cu_seqlens)


@without_autocast
def _gsa(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, g: Tensor | None, scale: float | None, initial_state: State | None,
    final: bool, reverse: bool, cu_seqlens: Tensor | None,
) -> tuple[Tensor, list[Tensor | None]]:  # fmt: skip
    hk, hv, *rest = (None, None) if initial_state is None else initial_state
    finals: list[Tensor | None] = []
    if g is None:
        s, g, z = _gate(s.float(), rest[0] if rest else None, reverse, cu_seqlens)
        finals = [z] if rest else []
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    K, V, M = q.shape[-1], v.shape[-1], s.shape[-1]
    if goes_token_by_token(q.shape[1], q, k, v, s, g, hk, hv) and M * max(K, V) <= MOST:
        refuse_transforms((q, k, v, s, g, hk, hv))
        q, k, v, s, g = (x.contiguous() for x in (q, k, v, s, g))
        hk, hv, cu_seqlens = (None if x is None else x.contiguous() for x in (hk, hv, cu_seqlens))
        with on_device(q):
            o, *states = slots(q, k, v, s, g, hk, hv, scale, final, reverse, cu_seqlens)
        return o, states + finals if final else [None] * (2 + len(finals))
    groups = q.shape[2] // k.shape[2]
    k, v, s, g = (_repeat(x, groups, 2) for x in (k, v, s.to(q.dtype), g))
    hk, hv = (None if x is None else _repeat(x, groups, 1) for x in (hk, hv))
    options: dict[str, Any] = {"output_final_state": final, "reverse": reverse, "cu_seqlens": cu_seqlens}
    p, hk = vector_linear(q, k, s, gv=g, scale=scale, initial_state=hk, softmax=True, **options)
    o, hv = vector_linear(p, s, v, gk=g, scale=1.0, initial_state=hv, **options)
    finals = [None if x is None else x[:, ::groups] for x in (hk, hv)] + finals
    return o, finals if final else [None] * len(finals)
