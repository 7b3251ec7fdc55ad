# SPDX-License-Identifier: MIT
"""What both forms of Comba take: its read key, and its operands."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fla.ops._common import checks
from fla.ops._delta.op import Sizes, Values
from fla.ops._delta.rows import COMBA, DeltaRow, Operands
from fla.ops._delta.torch_inputs import activate


def check_read_key(values: Values, sizes: Sizes) -> None:
    """``p`` is like ``k``, of any floating dtype, or None."""
    p = values["p"]
    checks.check_shapes(sizes, p=(p, "B T H K"))
    checks.check_floating(p=p)
    checks.check_same_device(q=values["q"], p=p)


def comba_operands(
    q: Tensor, k: Tensor, v: Tensor, p: Tensor | None, g: Tensor, beta: Tensor | None, l2norm: bool
) -> tuple[DeltaRow, Operands]:
    """The row of a call and its operands: without ``p`` the write key is the read key too."""
    if p is None:
        row = replace(COMBA, read_key="k")
        return row, activate(row, q, k, v, g, beta, l2norm=l2norm)
    return COMBA, activate(COMBA, q, k, v, g, beta, l2norm=l2norm, p=p)
