# SPDX-License-Identifier: MIT
"""One step of the recurrence in plain PyTorch: decoding on devices without Triton. Differentiable."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["step"]


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    state: Tensor | None = None,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """``S' = diag(e^(g + gk)) S diag(e^gv) + k (x) v`` and ``o = scale q S'``.

    Args:
        q, k: ``[N, H, K]``.
        v: ``[N, H, V]``.
        scale: factor of the output.
        g: log decay, broadcastable to ``[N, H]``; gk: ``[N, H, K]``; gv: ``[N, H, V]``.
        state: ``[N, H, K, V]``, or ``[N, H, V, K]`` with `state_v_first`; None for zero. It is not changed.
        state_v_first: layout of `state` and of the new state.

    Returns:
        ``o`` ``[N, H, V]`` in the dtype of `q` and the new state in float32, or float64 with float64 inputs.
    """
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    q32, k32, v32 = q.to(dtype), k.to(dtype), v.to(dtype)
    # Work on [rows, columns] in the layout of the state, so that no step transposes it.
    row, column, row_gate, column_gate = (v32, k32, gv, gk) if state_v_first else (k32, v32, gk, gv)
    rows, columns = row.unsqueeze(-1), column.unsqueeze(-2)
    if state is None:
        new = rows * columns
    else:
        new = state.to(dtype)
        if g is not None and row_gate is None and column_gate is None:
            new = new * g.to(dtype).exp()[..., None, None]
        elif g is not None and row_gate is not None:
            row_gate = row_gate.to(dtype) + g.to(dtype).unsqueeze(-1)
        elif g is not None and column_gate is not None:
            column_gate = column_gate.to(dtype) + g.to(dtype).unsqueeze(-1)
        if row_gate is not None:
            new = new * row_gate.to(dtype).exp().unsqueeze(-1)
        if column_gate is not None:
            new = new * column_gate.to(dtype).exp().unsqueeze(-2)
        new = torch.addcmul(new, rows, columns)
    if state_v_first:
        o = torch.matmul(new, q32.unsqueeze(-1)).squeeze(-1)
    else:
        o = torch.matmul(q32.unsqueeze(-2), new).squeeze(-2)
    return (o * scale).to(q.dtype), new
