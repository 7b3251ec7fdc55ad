# SPDX-License-Identifier: MIT
"""Launches of the pass over time, with the states in the caller's layout at both ends."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fla.ops._common.launch import aligned
from fla_backend_tilelang.programs import NAMES, blank, program
from fla_backend_tilelang.tokens import Tokens

NONE, K_FIRST, V_FIRST = 0, 1, 2


@dataclass(frozen=True)
class Pass:
    """States of a call: what comes in, and whether and how the last ones are wanted."""

    tokens: Tokens
    q: Tensor
    HV: int
    V: int
    initial: Tensor | None
    wanted: bool
    v_first: bool

    @property
    def layout(self) -> int:
        return V_FIRST if self.v_first else K_FIRST

    def shape(self, layout: int) -> tuple[int, ...]:
        K = self.q.shape[-1]
        return (self.tokens.sequences, self.HV, *((self.V, K) if layout == V_FIRST else (K, self.V)))

    def new(self, layout: int) -> Tensor:
        return self.q.new_empty(self.shape(layout), dtype=torch.float32)

    def nothing(self, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """The result of a call without tokens."""
        if not self.wanted:
            return torch.zeros_like(v), None
        final = self.new(self.layout).zero_()
        return torch.zeros_like(v), final if self.initial is None else final.copy_(self.initial)


def run_pass(
    task: Pass,
    q: Tensor,
    k: Tensor,
    kk: Tensor,
    v: Tensor,
    Tm: Tensor,
    A: Tensor,
    scalars: Tensor,
    chunk: int,
    block: int,
    stages: int,
    *,
    vector: bool,
) -> tuple[Tensor, Tensor | None]:
    """Outputs ``[rows, HV, V]`` and the final states, from the tiles of the first stage."""
    tokens = task.tokens
    K, device = q.shape[-1], q.device
    o = torch.empty_like(v)
    cu, offsets = tokens.cuts(device)
    unread = blank(device, torch.float32, 1, task.HV, K, task.V), blank(device, torch.float32, 1, task.HV, task.V, K)
    before = NONE if task.initial is None else task.layout
    state = unread[before == V_FIRST] if task.initial is None else aligned(task.initial.float())
    after = task.layout if task.wanted else NONE
    final = task.new(after) if task.wanted else None

    def launch(initial: int, state: Tensor, final: int, out: Tensor, tail: bool) -> None:
        made = program(
            "scan",
            "scan",
            K=K,
            V=task.V,
            BV=block,
            C=chunk,
            stages=stages,
            dtype=NAMES[v.dtype],
            vector=vector,
            varlen=tokens.packed,
            initial=initial,
            final=final,
            tail=tail,
        )
        made(q, k, kk, v, Tm, A, scalars, cu, offsets, state, out, o, tokens.length, tokens.sequences)

    out = unread[after == V_FIRST] if final is None else final
    if not tokens.ragged:
        launch(before, state, after, out, False)
    elif not tokens.packed and tokens.length < chunk:
        launch(before, state, after, out, True)
    else:
        between = task.new(V_FIRST)
        launch(before, state, V_FIRST, between, False)
        launch(V_FIRST, between, after, out, True)
    return o, final
