# SPDX-License-Identifier: MIT
"""The forward of the gated delta rule with a decay per head: two programs, and a third for ragged ends."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fla.ops._common.launch import aligned, on_device
from fla_backend_tilelang.programs import NAMES, TILE, blank, choose_block, program
from fla_backend_tilelang.timepass import Pass, run_pass
from fla_backend_tilelang.tokens import Tokens

CHUNK, STAGES = 64, 3


@dataclass(frozen=True)
class Switches:
    """What happens in the kernel."""

    norm: bool = False
    sigmoid: bool = False
    negative: bool = False
    gate: bool = False


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    switches: Switches,
) -> tuple[Tensor, Tensor | None]:
    """Outputs ``[B, T, HV, V]`` in the dtype of q, and the final states in fp32 or None. Conventions of core's op.

    Args:
        q, k: ``[B, T, H, K]``, float16 or bfloat16.
        v: ``[B, T, HV, V]``.
        g, beta: ``[B, T, HV]``, float32 or the dtype of q; ``g`` None for no decay.
        initial_state: ``[N, HV, K, V]``, or ``[N, HV, V, K]`` with `state_v_first`.
        A_log, dt_bias: ``HV`` elements each, for the gate in the kernel.
    """
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    with on_device(q):
        tokens = Tokens.of(B, T, CHUNK, cu_seqlens)
        task = Pass(tokens, q, HV, V, initial_state, output_final_state, state_v_first)
        if tokens.empty or HV == 0:
            return task.nothing(v)
        rows = B * T
        q, k, v = (aligned(x).view(rows, x.shape[2], x.shape[3]) for x in (q, k, v))
        beta = aligned(beta).view(rows, HV)
        gates = beta if g is None else aligned(g).view(rows, HV)
        Tm, A = q.new_empty(2, tokens.chunks, HV, CHUNK, CHUNK, dtype=TILE)
        scalars = q.new_empty(tokens.chunks, HV, 4, CHUNK, dtype=torch.float32)
        one = blank(q.device, torch.float32, 1)
        prepare = program(
            "scalar_prep",
            "scalar_prep",
            K=K,
            dtype=NAMES[q.dtype],
            g_dtype=NAMES[gates.dtype],
            beta_dtype=NAMES[beta.dtype],
            group=HV // H,
            norm=switches.norm,
            gate=0 if g is None else 2 if switches.gate else 1,
            bias=dt_bias is not None,
            sigmoid=switches.sigmoid,
        )
        prepare(
            q,
            k,
            gates,
            beta,
            one if A_log is None else aligned(A_log.reshape(-1).float()),
            one if dt_bias is None else aligned(dt_bias.reshape(-1).float()),
            tokens.table(q.device),
            Tm,
            A,
            scalars,
            K**-0.5 if scale is None else float(scale),
            2.0 if switches.negative else 1.0,
        )
        block = choose_block(V, tokens.sequences * HV, q.device)
        q, k = q.to(TILE), k.to(TILE)
        o, final = run_pass(task, q, k, k, v, Tm, A, scalars, CHUNK, block, STAGES, vector=False)
    return o.view(B, T, HV, V), final
