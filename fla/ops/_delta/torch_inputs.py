# SPDX-License-Identifier: MIT
"""From the arguments of a public op to the operands of the engine: normalise, activate, name by the row."""

from __future__ import annotations

from torch import Tensor

from fla.ops._common.gates import compute_dtype, decay_gate, l2_normalise, write_gate
from fla.ops._delta.rows import Decay, DeltaRow, Operands, operands


def activate(
    row: DeltaRow,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    *,
    l2norm: bool = False,
    gate: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    sigmoid: bool = False,
    allow_neg_eigval: bool = False,
) -> Operands:
    """Operands of a row whose coefficient is ``beta``; the flags are those of the public ops."""
    dtype = compute_dtype(q.dtype)
    if l2norm:
        q, k = l2_normalise(q.to(dtype)), l2_normalise(k.to(dtype))
    if gate and g is not None:
        g = decay_gate(g, A_log, dt_bias, lower_bound, row.decay is Decay.VECTOR, dtype)
    arguments = {"q": q, "k": k, "v": v}
    if beta is not None:
        arguments["beta"] = write_gate(beta, sigmoid, allow_neg_eigval, dtype)
    return operands(row, g, **arguments)
