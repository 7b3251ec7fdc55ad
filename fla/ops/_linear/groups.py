# SPDX-License-Identifier: MIT
"""Host side of the scans in Gluon (`kernels.scalar_groups*`): when they run, and their launches."""

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


@functools.lru_cache(maxsize=1)
def _thrice() -> Launcher:
    from fla.ops._linear.kernels.scalar_groups_backward import linear_groups_thrice

    return Launcher(linear_groups_thrice)


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


def serve_thrice(call: ScalarCall) -> bool:
    """Whether the three scans of the backward run here."""
    return call.plan.groups == 2 and call.K == call.V and serve(call, None)


def thrice(
    call: ScalarCall, q: Tensor, k: Tensor, v: Tensor, do: Tensor, decays: Decays, h0: Tensor | None,
    dht: Tensor | None, dh0: Tensor | None, entry: Tensor | None, dq: Tensor, dk: Tensor, dv: Tensor,
) -> bool:  # fmt: skip
    """`scalar.thrice` into ``dq``, ``dk`` and ``dv``, and ``dh0`` where given; whether it was done."""
    p, t = call.plan, call.table
    tile = lambda x, block: descriptor(x, call.B * call.T, call.H * call.K, _C, block)
    fill = lambda x: k if x is None else x
    stretches = 1 if entry is None else call.marks
    args = (
        k, *(tile(x, call.K) for x in (q, k, v, do)), *(tile(x, _BV) for x in (q, k, do)), decays.args(k)[1],
        dq, tile(dq, _BV), dk, tile(dk, _BV), dv, tile(dv, _BV), fill(h0), fill(dht), fill(dh0), fill(entry),
        *call.index(k), t.sequences, int(h0 is not None), int(dht is not None), int(dh0 is not None), stretches,
        call.scale,
    )  # fmt: skip
    meta = {
        "K": call.K, "C": _C, "DECAY": call.decay, "SPLIT": entry is not None, "VFIRST": call.v_first,
        "VARLEN": t.varlen, "TAIL": call.tail, "P": p.places,
    }  # fmt: skip
    given = (q, k, v, do, decays.gamma, h0, dht, dh0, t.cu)
    try:
        _thrice().fix(meta, OPTIONS)(call.H * t.sequences * (2 + stretches), args, given)
    except Exception as error:
        if not gluon.gave_up(error):
            raise
        return False
    return True
