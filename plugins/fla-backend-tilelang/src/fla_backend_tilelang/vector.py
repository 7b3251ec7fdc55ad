# SPDX-License-Identifier: MIT
"""The forward of Kimi Delta Attention with a bounded gate: two programs, and a third for ragged ends."""

from __future__ import annotations

import torch
from torch import Tensor

from fla.ops._common.launch import aligned, on_device
from fla_backend_tilelang.programs import NAMES, TILE, blank, choose_block, program
from fla_backend_tilelang.scalar import Switches
from fla_backend_tilelang.timepass import Pass, run_pass
from fla_backend_tilelang.tokens import Tokens

ROWS, CHUNK, STAGES, FIT = 64, 32, 3, 3


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    switches: Switches,
) -> tuple[Tensor, Tensor | None]:
    """Outputs ``[B, T, HV, V]`` in the dtype of q, and the final states in fp32 or None. Conventions of core's op.

    Args:
        q, k: ``[B, T, H, K]``, float16 or bfloat16.
        v: ``[B, T, HV, V]``.
        g: ``[B, T, HV, K]``, float32 or the dtype of q; log decays in [-5, 0], or raw with the gate in the kernel.
        beta: ``[B, T, HV]``, likewise.
        A_log, dt_bias: ``HV`` and ``HV * K`` elements, or None.
        lower_bound: of the gate in the kernel, in [-5, 0).
    """
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    with on_device(q):
        tokens = Tokens.of(B, T, ROWS, cu_seqlens, CHUNK)
        task = Pass(tokens, q, HV, V, initial_state, output_final_state, state_v_first)
        if tokens.empty or HV == 0:
            return task.nothing(v)
        rows = B * T
        q, k, v, g = (aligned(x).view(rows, x.shape[2], x.shape[3]) for x in (q, k, v, g))
        beta = aligned(beta).view(rows, HV)
        kd, ku, qd = q.new_empty(3, tokens.chunks, HV, ROWS, K, dtype=TILE)
        Tm, A = q.new_empty(2, tokens.chunks, HV, ROWS, CHUNK, dtype=TILE)
        ends = q.new_empty(tokens.chunks, HV, ROWS // CHUNK, K, dtype=torch.float32)
        prepare = program(
            "vector_prep",
            "vector_prep",
            K=K,
            dtype=NAMES[q.dtype],
            g_dtype=NAMES[g.dtype],
            beta_dtype=NAMES[beta.dtype],
            group=HV // H,
            norm=switches.norm,
            gate=2 if switches.gate else 1,
            rate=A_log is not None,
            bias=dt_bias is not None,
            sigmoid=switches.sigmoid,
            fit=FIT,
        )
        prepare(
            q,
            k,
            g,
            beta,
            blank(q.device, torch.float32, 1) if A_log is None else aligned(A_log.reshape(-1).float()),
            blank(q.device, torch.float32, 1, K) if dt_bias is None else aligned(dt_bias.reshape(-1, K).float()),
            tokens.table(q.device),
            kd,
            ku,
            qd,
            Tm,
            A,
            ends,
            K**-0.5 if scale is None else float(scale),
            2.0 if switches.negative else 1.0,
            0.0 if lower_bound is None else float(lower_bound),
        )
        block = choose_block(V, tokens.sequences * HV, q.device)
        o, final = run_pass(task, qd, kd, ku, v, Tm, A, ends, CHUNK, block, STAGES, vector=True)
    return o.view(B, T, HV, V), final
