# SPDX-License-Identifier: MIT
"""What both forms of gated slot attention share: checks, empty outputs, and the PyTorch path.

Reading is two passes of the linear engine with a softmax between them: keys into slots, where slots are values with a
gate each, then slots into values, where slots are keys with the same gate.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fla.ops._common import checks
from fla.ops._common.checks import ArgumentError
from fla.ops._common.gates import compute_dtype, to_output, without_autocast
from fla.ops._linear.op import CHUNK_SIZES
from fla.ops._linear.torch_chunk import linear_attention
from fla.ops.gsa.gate import additive_gate

State = tuple[Tensor | None, ...] | list[Tensor | None]


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> None:
    """What both forms check."""
    for name, tensor in (("q", q), ("k", k), ("v", v), ("s", s)):
        checks.check_tensor(name, tensor)
    sizes = checks.check_shapes(
        q=(q, "B T HQ K"), k=(k, "B T H K"), v=(v, "B T H V"), s=(s, "B T H M"), g=(g, "B T H M")
    )
    checks.check_same_dtype(q=q, k=k, v=v)
    HQ, H = sizes["HQ"], sizes["H"]
    if HQ != H and (H == 0 or HQ % H):
        raise ArgumentError(
            f"The number of query heads must be a multiple of that of key heads, got HQ = {HQ}, H = {H}."
        )
    states = _states(g, initial_state)
    checks.check_floating(s=s, g=g, **states)
    checks.check_same_device(q=q, k=k, v=v, s=s, g=g, **states)
    device = None if cu_seqlens is None else q.device
    N = checks.check_varlen(cu_seqlens, cu_seqlens_cpu, sizes["B"], sizes["T"], device=device)
    for (name, state), layout in zip(states.items(), ("N H K M", "N H M V", "N 1 H M"), strict=False):
        if state is not None and state.dim() and state.shape[0] != N:
            raise ArgumentError(
                f"The number of initial states is expected to be equal to the number of sequences, {N}, "
                f"got `{name}` with shape {list(state.shape)}."
            )
        checks.check_shapes({**sizes, "N": N, "1": 1}, **{name: (state, layout)})
    checks.check_scale(scale, sizes["K"])


def check_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    cu_seqlens: Tensor | None = None,
) -> None:
    """Validation of the recurrent form."""
    _check(q, k, v, s, g, scale, initial_state, cu_seqlens)


def check_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    checkpoint_level: int = 2,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_size: int | None = None,
) -> None:
    """Validation of the chunk form."""
    _check(q, k, v, s, g, scale, initial_state, cu_seqlens, cu_seqlens_cpu)
    checks.check_choice("checkpoint_level", checkpoint_level, (0, 1, 2))
    if chunk_size is not None:
        checks.check_chunk_size(chunk_size, CHUNK_SIZES)


def _states(g: Tensor | None, state: State | None) -> dict[str, Tensor | None]:
    """The initial states by the names that errors call them."""
    if state is None:
        return {}
    if not isinstance(state, (tuple, list)) or len(state) not in (2, 3):
        given = f"{len(state)} of them" if isinstance(state, (tuple, list)) else type(state).__name__
        raise ArgumentError(f"`initial_state` must be the states (hk, hv), or (hk, hv, z) without `g`, got {given}.")
    if len(state) == 3 and g is not None:
        raise ArgumentError("`initial_state` has a third state `z`, which only goes with g=None.")
    for i, part in enumerate(state):
        if part is not None:
            checks.check_tensor(f"initial_state[{i}]", part)
    return {f"initial_state[{i}]": part for i, part in enumerate(state)}


def gsa_outputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    initial_state: State | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """Empty ``(o, final_state)`` of a call."""
    o = q.new_empty((*q.shape[:3], v.shape[-1]))
    count = 2 if initial_state is None else len(initial_state)
    if not output_final_state:
        return o, [None] * count
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    (H, K), V, M = k.shape[2:], v.shape[-1], s.shape[-1]
    shapes = ((N, H, K, M), (N, H, M, V), (N, 1, H, M))
    return o, [q.new_empty(shape, dtype=compute_dtype(q.dtype)) for shape in shapes[:count]]


@without_autocast
def gsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    g: Tensor | None,
    scale: float | None,
    initial_state: State | None,
    output_final_state: bool,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """The PyTorch path of both forms."""
    dtype = compute_dtype(q.dtype)
    hk, hv, *rest = (None, None) if initial_state is None else initial_state
    finals: list[Tensor | None] = []
    if g is None:
        s, g, z = _gate(s.to(dtype), rest[0] if rest else None, reverse, cu_seqlens)
        finals = [z] if rest else []
    groups = q.shape[2] // k.shape[2] if k.shape[2] else 1
    k, v, s, g = (_repeat(x, groups, 2) for x in (k, v, s, g))
    hk, hv = (None if x is None else _repeat(x, groups, 1) for x in (hk, hv))
    options: dict[str, Any] = {"output_final_state": output_final_state, "reverse": reverse}
    options |= {"cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu}
    # Float32 queries give float32 results: the softmax sees scores that were never rounded.
    scores, hk = linear_attention(q.to(dtype), k, s, scale=scale, gv=g, initial_state=hk, **options)
    o, hv = linear_attention(scores.softmax(-1), s, v, scale=1.0, gk=g, initial_state=hv, **options)
    finals = [None if x is None else x[:, ::groups] for x in (hk, hv)] + finals
    return to_output(o, q.dtype), finals if output_final_state else [None] * len(finals)


def _repeat(x: Tensor, groups: int, axis: int) -> Tensor:
    return x if groups == 1 else x.repeat_interleave(groups, axis)


def _gate(s: Tensor, z: Tensor | None, reverse: bool, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, log decays and last normaliser from log scores, in the direction of the run."""
    if not reverse:
        return additive_gate(s, z, cu_seqlens)
    if cu_seqlens is None:
        weights, g, last = additive_gate(s.flip(1), z)
    else:
        # The last sequence comes first now.
        z = None if z is None else z.flip(0)
        weights, g, last = additive_gate(s.flip(1), z, s.shape[1] - cu_seqlens.flip(0))
        last = last.flip(0)
    return weights.flip(1), g.flip(1), last
