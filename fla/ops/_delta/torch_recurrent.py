# SPDX-License-Identifier: MIT
"""The delta rule token by token in PyTorch: what decoding uses, and the forms that have no chunk form.

Float32 arithmetic (float64 for float64), differentiable. Packed sequences advance together: token 0 of every sequence,
then token 1 of those that have one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fla.ops._common.gates import compute_dtype, without_autocast
from fla.ops._common.varlen import ChunkPlan, longest_sequence, plan_chunks
from fla.ops._delta.rows import Decay, DeltaRow, Operands, ReadTime
from fla.ops._delta.torch_chunk import chunk_delta, fitting_chunk

# Up to here the loop's few calls per token cost less than the chunk form's fixed number of calls.
LOOP_TOKENS = 16


class TokenSteps:
    """Operands of one call cut into tokens, in the order of a plan with one token per chunk."""

    def __init__(self, row: DeltaRow, x: Operands, plan: ChunkPlan, scale: float) -> None:
        HV = x.value.shape[2]
        dtype = compute_dtype(x.q.dtype)

        def tokens(t: Tensor | None) -> Tensor | None:
            if t is None:
                return None
            # One token per sequence needs no reordering.
            t = t[:, 0] if plan.index is None and plan.tokens == 1 else plan.pack(t)[:, 0]
            return t.to(dtype)

        def heads(t: Tensor) -> Tensor:
            return t if t.shape[1] == HV else t.repeat_interleave(HV // t.shape[1], 1)

        def per_channel(t: Tensor | None) -> Tensor | None:
            return t if t is None or t.dim() == 3 else t.unsqueeze(-1)

        q, write, value = tokens(x.q), tokens(x.write), tokens(x.value)
        assert q is not None
        assert write is not None
        assert value is not None
        self.q = heads(q * scale)
        self.write = heads(write)
        if x.read is x.write:
            self.read = self.write
        else:
            read = tokens(x.read)
            assert read is not None
            self.read = heads(read)
        self.value = value
        decay = tokens(x.decay) if row.decay is not Decay.NONE else None
        self.decay = per_channel(decay.exp() if decay is not None else None)
        # A gain that is the eraser too scales the whole update.
        shared = x.erase is x.gain
        self.gain = per_channel(tokens(x.gain))
        self.erase = None if shared else per_channel(tokens(x.erase))
        self.scales_update = shared
        value_decay = tokens(x.value_decay)
        self.value_decay = value_decay.exp() if value_decay is not None else None
        self.exclusive = row.read_time is ReadTime.EXCLUSIVE
        self.steps = plan.steps

    def bounds(self) -> Iterator[tuple[int, int]]:
        """Rows of each step."""
        start = 0
        for n in self.steps:
            yield start, start + n
            start += n

    def advance(self, S: Tensor, a: int, b: int) -> tuple[Tensor, Tensor]:
        """Outputs ``[n, HV, V]`` and next states for the tokens in rows ``a:b``; ``S [n, HV, K, V]`` is not changed."""
        before = S
        if self.decay is not None:
            S = S * self.decay[a:b].unsqueeze(-1)
        if self.value_decay is not None:
            S = S * self.value_decay[a:b].unsqueeze(-2)
        read, value = self.read[a:b], self.value[a:b]
        if self.erase is not None:
            read = read * self.erase[a:b]
        if self.gain is not None and not self.scales_update:
            value = value * self.gain[a:b]
        update = value - torch.matmul(read.unsqueeze(-2), before if self.exclusive else S).squeeze(-2)
        if self.gain is not None and self.scales_update:
            update = update * self.gain[a:b]
        S = torch.addcmul(S, self.write[a:b].unsqueeze(-1), update.unsqueeze(-2))
        return torch.matmul(self.q[a:b].unsqueeze(-2), S).squeeze(-2), S


@without_autocast
def _loop(
    row: DeltaRow,
    x: Operands,
    scale: float,
    initial_state: Tensor | None,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
) -> tuple[Tensor, Tensor]:
    B, T, HV, V = x.value.shape
    K = x.q.shape[-1]
    plan = plan_chunks(B, T, 1, x.q.device, cu_seqlens, cu_seqlens_cpu)
    tokens = TokenSteps(row, x, plan, scale)
    if initial_state is None:
        S = tokens.q.new_zeros(plan.sequences, HV, K, V)
    else:
        S = plan.sort_states(initial_state).to(tokens.q.dtype)
        S = S.mT if state_v_first else S
    outputs, ended = [], []
    for a, b in tokens.bounds():
        if b - a < S.shape[0]:
            ended.append(S[b - a :])
            S = S[: b - a]
        o, S = tokens.advance(S, a, b)
        outputs.append(o)
    if ended:
        S = torch.cat([S, *reversed(ended)])
    final = plan.unsort_states(S)
    if not outputs:
        o = x.value.new_zeros(B, T, HV, V, dtype=tokens.q.dtype)
    elif plan.index is None:
        o = torch.stack(outputs, 1) if T > 1 else outputs[0].unsqueeze(1)
    else:
        o = plan.unpack(torch.cat(outputs).unsqueeze(1))
    if initial_state is not None and not outputs:
        final = final.clone()
    return o, final.mT.contiguous() if state_v_first else final


def recurrent_delta(
    row: DeltaRow,
    x: Operands,
    *,
    scale: float,
    initial_state: Tensor | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs ``[B, T, HV, V]`` and final states of an op, arguments as for ``chunk_delta``.

    Long sequences take the chunk form, which gives the same result faster, unless the operands have none
    (``value_decay``, or ``beta`` per value channel).
    """
    loop = x.value_decay is not None or x.value_wise_erase
    if loop or 0 < longest_sequence(x.q.shape[1], cu_seqlens, cu_seqlens_cpu) <= LOOP_TOKENS:
        return _loop(row, x, scale, initial_state, state_v_first, cu_seqlens, cu_seqlens_cpu)
    o, final, _ = chunk_delta(
        row,
        x,
        scale=scale,
        initial_state=initial_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        chunk_size=fitting_chunk(x.q.shape[1], cu_seqlens, cu_seqlens_cpu),
    )
    return o, final
