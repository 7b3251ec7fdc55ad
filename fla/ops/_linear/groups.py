# SPDX-License-Identifier: MIT
"""Host side of the forward scan in Gluon (`kernels.scalar_groups`): when it runs, and its launch."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from torch import Tensor

from fla.ops._common import gluon
from fla.ops._common.launch import Launcher, descriptor

if TYPE_CHECKING:
    from fla.ops._linear.scalar import Decays, ScalarCall

OPTIONS = {"num_warps": 4}
# Columns of V of a group, and tokens of a step.
_BV = _C = 64


@functools.lru_cache(maxsize=1)
def _scan() -> Launcher:
    from fla.ops._linear.kernels.scalar_groups import linear_groups_scan

    return Launcher(linear_groups_scan)


def serve(call: ScalarCall, inverse: Tensor | None) -> bool:
    """Whether the forward scan of ``call`` runs here: whole sequences, whose outputs nothing divides."""
    p = call.plan
    return p.groups > 0 and p.descriptors and call.segments == 1 and inverse is None and gluon.why_not() is None


def scan(
    call: ScalarCall, q: Tensor, k: Tensor, v: Tensor, decays: Decays, h0: Tensor | None, entry: Tensor | None,
    o: Tensor, ht: Tensor | None,
) -> bool:  # fmt: skip
    """`scalar.forward` into ``o`` and ``ht``; into ``entry`` the states in which stretches of the backward begin.

    False: it was not done, because the kernel does not compile here.
    """
    p, t, sums = call.plan, call.table, decays.sums
    rows, width = call.B * call.T, call.H * call.V
    qd, kd = (descriptor(x, rows, call.H * call.K, _C, call.K) for x in (q, k))
    # Four rows of the three that a tile has: descriptors take powers of two.
    sd = qd if sums is None else descriptor(sums, call.tiles * 3, _C, 4, _C)
    sums, gamma = decays.args(k)
    args = (
        sums, qd, kd, descriptor(v, rows, width, _C, _BV), sd, gamma, o, descriptor(o, rows, width, _C, _BV),
        k if h0 is None else h0, k if ht is None else ht, k if entry is None else entry, *call.index(k),
        int(h0 is not None), int(ht is not None), call.marks, call.scale,
    )  # fmt: skip
    meta = {
        "K": call.K, "V": call.V, "C": _C, "DECAY": call.decay, "MARK": entry is not None, "VFIRST": call.v_first,
        "VARLEN": t.varlen, "TAIL": call.tail, "N": p.places, "NC": p.groups,
    }  # fmt: skip
    grid = call.V // (_BV * p.groups) * call.H * t.sequences
    try:
        _scan().fix(meta, OPTIONS)(grid, args, (q, k, v, decays.gamma, h0, t.cu, ht))
    except Exception as error:
        if not gluon.gave_up(error):
            raise
        return False
    return True
