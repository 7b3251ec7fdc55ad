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
    beta: Tensor | None = None,
    *,
    l2norm: bool = False,
    gate: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    **others: Tensor,
) -> Operands:
    """Operands of a row; the flags are those of the public ops, ``others`` what the row names beyond ``k`` and
    ``beta``. ``l2norm`` is for queries and all keys."""
    dtype = compute_dtype(q.dtype)
    arguments = {"q": q, "k": k, "v": v, **others}
    if l2norm:
        for name in {"q", row.read_key, row.write_key}:
            arguments[name] = l2_normalise(arguments[name].to(dtype))
    if gate and g is not None:
        g = decay_gate(g, A_log, dt_bias, lower_bound, row.decay is Decay.VECTOR, dtype)
    if beta is not None:
        arguments["beta"] = write_gate(beta, sigmoid, allow_neg_eigval, dtype)
    return operands(row, g, **arguments)
