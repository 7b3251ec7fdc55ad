# SPDX-License-Identifier: MIT
"""Decoding with preallocated outputs and states updated in place, also in a pool of slots; PyTorch, no gradients."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fla.ops._common import checks
from fla.ops._common.checks import ArgumentError, DtypeError
from fla.ops._common.gates import to_output, without_autocast
from fla.ops._common.varlen import ChunkPlan, host_offsets, plan_chunks
from fla.ops._delta.rows import DeltaRow, Operands
from fla.ops._delta.torch_recurrent import TokenSteps


def check_serving(
    sizes: Mapping[str, int],
    v: Tensor,
    tensors: Sequence[Tensor | None],
    *,
    initial_state: Tensor | None,
    inplace_final_state: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    ssm_state_indices: Tensor | None,
    num_accepted_tokens: Tensor | None,
    out: Tensor | None,
) -> None:
    """Check what a serving entry takes beyond the recurrent op; ``sizes`` from ``check_call``, ``tensors`` all its
    inputs."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise ArgumentError(
            "A serving entry computes no gradients, but an input requires one: "
            "use the differentiable op, or torch.no_grad()."
        )
    if initial_state is None and (inplace_final_state or ssm_state_indices is not None):
        reason = "inplace_final_state=True" if inplace_final_state else "`ssm_state_indices`"
        raise ArgumentError(f"{reason} needs `initial_state`, the states to read and write.")
    if out is not None:
        checks.check_floating(out=out)
        if out.shape != v.shape or out.device != v.device:
            raise ArgumentError(
                f"`out` must be like `v`, {list(v.shape)} on {v.device}, got {list(out.shape)} on {out.device}."
            )
    if ssm_state_indices is None:
        if num_accepted_tokens is not None:
            raise ArgumentError("`num_accepted_tokens` needs `ssm_state_indices`.")
        return

    N = sizes["N"]
    assert initial_state is not None
    slots = initial_state.shape[0] if initial_state.dim() else 0
    checks.check_state("initial_state", initial_state, slots, sizes["HV"], sizes["K"], sizes["V"], state_v_first)
    for name, index, ranks in (
        ("ssm_state_indices", ssm_state_indices, (1, 2)),
        ("num_accepted_tokens", num_accepted_tokens, (1,)),
    ):
        if index is None:
            continue
        checks.check_tensor(name, index)
        if index.dtype not in (torch.int32, torch.int64):
            raise DtypeError(f"`{name}` must be int32 or int64, got {index.dtype}.")
        if index.dim() not in ranks or index.shape[0] != N:
            forms = f"[{N}]" if ranks == (1,) else f"[{N}] or [{N}, tokens]"
            raise ArgumentError(f"`{name}` must have shape {forms}, one row per sequence, got {list(index.shape)}.")
        if index.device != v.device:
            raise ArgumentError(f"`{name}` must be on the device of the inputs, {v.device}, got {index.device}.")
    if num_accepted_tokens is not None and ssm_state_indices.dim() == 1:
        raise ArgumentError("`num_accepted_tokens` needs `ssm_state_indices` with a slot per draft token, [N, tokens].")
    if ssm_state_indices.device.type == "cpu":
        _check_slots(ssm_state_indices, num_accepted_tokens, slots, sizes["T"], cu_seqlens, inplace_final_state)


def _check_slots(
    indices: Tensor, accepted: Tensor | None, slots: int, T: int, cu_seqlens: Tensor | None, inplace: bool
) -> None:
    rows = indices.unsqueeze(-1).tolist() if indices.dim() == 1 else indices.tolist()
    lengths = [T] * len(rows)
    if cu_seqlens is not None:
        offsets = host_offsets(cu_seqlens)
        lengths = [b - a for a, b in itertools.pairwise(offsets)]
    if indices.dim() == 2 and max(lengths, default=0) > indices.shape[1]:
        raise ArgumentError(
            f"`ssm_state_indices` must have a column for each of the {max(lengths)} tokens, got {indices.shape[1]}."
        )
    owner: dict[int, int] = {}
    for n, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        for slot in row[:length] if inplace else ():
            if 0 <= slot < slots and owner.setdefault(slot, n) != n:
                raise ArgumentError(f"`ssm_state_indices` lets sequences {owner[slot]} and {n} both write slot {slot}.")
    if accepted is None or not inplace:
        return
    # A sequence may start from a slot that it does not write itself.
    for n, (row, length, count) in enumerate(zip(rows, lengths, accepted.tolist(), strict=True)):
        slot = row[count - 1] if length and 0 < count <= len(row) else -1
        if owner.get(slot, n) != n:
            raise ArgumentError(
                f"`ssm_state_indices` lets sequence {n} start from slot {slot}, which sequence {owner[slot]} writes."
            )


@without_autocast
@torch.no_grad()
def serve(
    row: DeltaRow,
    x: Operands,
    out: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    inplace_final_state: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    ssm_state_indices: Tensor | None,
    num_accepted_tokens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Write outputs into ``out`` and states where they belong; see ``fused_recurrent_kda_fwd`` for the contract."""
    checks.check_writable("out", out)
    if inplace_final_state and initial_state is not None:
        checks.check_writable("initial_state", initial_state)
    B, T, HV, V = x.value.shape
    plan = plan_chunks(B, T, 1, out.device, cu_seqlens)
    N = plan.sequences
    tokens = TokenSteps(row, x, plan, scale)
    live: Tensor | None = None
    indices: Tensor | None = None
    if ssm_state_indices is not None:
        assert initial_state is not None
        indices = ssm_state_indices.to(torch.int64)
        start, live = _starts(indices, num_accepted_tokens, initial_state.shape[0])
        indices, start, live = plan.sort_states(indices), plan.sort_states(start), plan.sort_states(live)
        S = initial_state.index_select(0, start.masked_fill(~live, 0)) if initial_state.shape[0] else None
    else:
        S = plan.sort_states(initial_state) if initial_state is not None else None
    if S is None:
        S = tokens.q.new_zeros(N, HV, x.q.shape[-1], V)
    elif state_v_first:
        S = S.mT
    S = S.to(tokens.q.dtype, copy=True)

    outputs, states = [], []
    for a, b in tokens.bounds():
        o, S[: b - a] = tokens.advance(S[: b - a], a, b)
        outputs.append(o)
        if indices is not None:
            states.append(S[: b - a].clone())
    _store_outputs(out, outputs, live, tokens, plan)

    layout = (lambda t: t.mT) if state_v_first else (lambda t: t)
    if indices is None:
        final = layout(plan.unsort_states(S))
        if not inplace_final_state:
            return out, final if output_final_state else None
        assert initial_state is not None
        return out, initial_state.copy_(final)
    assert live is not None
    assert initial_state is not None
    if not inplace_final_state:
        if not output_final_state:
            return out, None
        flat = torch.cat(states) if states else S[:0]
        flat = flat.masked_fill(~_live_rows(live, tokens).view(-1, 1, 1, 1), 0)
        return out, layout(plan.unpack(flat.unsqueeze(1)).flatten(0, 1))
    for step, state in enumerate(states):
        n = state.shape[0]
        if indices.dim() == 1:
            slot = indices[:n]
        elif step < indices.shape[1]:
            slot = indices[:n, step]
        else:
            break
        keep = live[:n] & (slot >= 0) & (slot < initial_state.shape[0])
        initial_state[slot[keep]] = layout(state[keep]).to(initial_state.dtype)
    return out, initial_state


def _starts(indices: Tensor, accepted: Tensor | None, slots: int) -> tuple[Tensor, Tensor]:
    """Slot that each sequence starts from, and whether it may be computed."""
    if indices.dim() == 1:
        start = indices
        live = torch.ones_like(start, dtype=torch.bool)
    elif accepted is None:
        start = indices[:, 0]
        live = torch.ones_like(start, dtype=torch.bool)
    else:
        column = accepted.to(torch.int64) - 1
        live = (column >= 0) & (column < indices.shape[1])
        start = indices.gather(1, column.masked_fill(~live, 0).unsqueeze(1)).squeeze(1)
    return start, live & (start >= 0) & (start < slots)


def _live_rows(live: Tensor, tokens: TokenSteps) -> Tensor:
    """``live`` of each token in step order."""
    return torch.cat([live[:n] for n in tokens.steps]) if tokens.steps else live[:0]


def _store_outputs(
    out: Tensor, outputs: list[Tensor], live: Tensor | None, tokens: TokenSteps, plan: ChunkPlan
) -> None:
    if not outputs:
        return
    o = to_output(plan.unpack(torch.cat(outputs).unsqueeze(1)), out.dtype)
    if live is None:
        out.copy_(o)
        return
    rows = plan.unpack(_live_rows(live, tokens).unsqueeze(1))
    out.copy_(torch.where(rows[..., None, None], o, out))
