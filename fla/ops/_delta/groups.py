# SPDX-License-Identifier: MIT
"""Host side of the state passes in Gluon (`kernels.scalar_groups`): when they run, and their launches."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fla.ops._common import gluon
from fla.ops._common.launch import Fixed, Launcher, descriptor

if TYPE_CHECKING:
    from fla.ops._delta.scalar import ScalarCall

# Columns of V of a group, and tokens of a step.
_BV = _C = 64


@functools.lru_cache(maxsize=1)
def _kernels() -> tuple[Launcher, Launcher]:
    """Launchers of the scan and the reverse scan."""
    from fla.ops._delta.kernels.scalar_groups import groups_scan
    from fla.ops._delta.kernels.scalar_groups_reverse import groups_reverse

    return Launcher(groups_scan), Launcher(groups_reverse)


def serve(call: ScalarCall, again: bool = False) -> bool:
    """Whether a state pass of ``call`` runs here. ``again``: it computes states again."""
    p = call.plan
    return p.groups > 0 and (p.groups_again or not again) and call.segments == 1 and gluon.why_not() is None


def _inputs(
    call: ScalarCall, q: Tensor, k: Tensor, read: Tensor | None, v: Tensor, T: Tensor, A: Tensor, sc: Tensor
) -> tuple[Any, ...]:
    """The scalars, and descriptors of what a pass reads."""
    t, s = call.table, call.shape
    tiles, rows = t.chunks * s.HV, s.B * s.T
    keys = tuple(descriptor(x, rows, s.H * s.K, _C, _block_k(s.K)) for x in (q, k, k if read is None else read))
    return (
        sc, *keys, descriptor(v, rows, s.HV * s.V, _C, _BV), descriptor(T, tiles * _C, _C, _C, _C),
        descriptor(A, tiles * _C, _C, _C, _C), descriptor(sc, tiles * 8, _C, 4, _C),
    )  # fmt: skip


def _block_k(K: int) -> int:
    """Channels of a tile of keys or states."""
    return 64 if K > 128 else K


def _options(call: ScalarCall) -> dict[str, Any]:
    # Two programs of 64 channels share a multiprocessor, so that it has to have registers for both.
    return {"num_warps": 4, "maxnreg": 128} if call.shape.K == 64 else {"num_warps": 4}


def _run(
    call: ScalarCall, key: tuple[Any, ...], which: int, meta: dict[str, Any], rings: tuple[int, int],
    args: tuple[Any, ...], given: tuple[Tensor | None, ...],
) -> bool:  # fmt: skip
    """Whether the pass was launched; if not, Triton's kernel has to do it."""
    s, groups = call.shape, call.plan.groups
    try:
        run: Fixed | None = call.launches.get(key)
        if run is None:
            meta = {
                "K": s.K, "V": s.V, "C": _C, **meta, "VFIRST": call.v_first, "VARLEN": call.table.varlen,
                "TAIL": call.tail, "WATCH": call.part == 1, "NA": rings[0], "NB": rings[1], "NC": groups,
            }  # fmt: skip
            run = call.launches[key] = _kernels()[which].fix(meta, _options(call))
        run(s.V // (_BV * groups) * s.HV * call.table.sequences, args, given)
    except Exception as error:
        if not gluon.gave_up(error):
            raise
        return False
    return True


def _rings(call: ScalarCall, read: bool, back: bool) -> tuple[int, int]:
    """Places of the two rings of the scan, or of the reverse pass. Two steps on their way are faster than three where
    two groups work on whole chunks (0.255 ms against 0.279)."""
    if call.shape.K == 128:
        if read:
            return (2, 2) if back else (3, 2)
        return (2, 2) if call.plan.groups == 2 and not call.tail else (2, 3) if back else (3, 3)
    # Two programs of 64 channels share a multiprocessor.
    return (2, 1) if read and back else (2, 2)


def _index(call: ScalarCall, sc: Tensor) -> tuple[Any, ...]:
    t, s = call.table, call.shape
    return sc if t.cu is None else t.cu, sc if t.offsets is None else t.offsets, s.T, t.per_sequence, s.H, s.HV


def scan(
    call: ScalarCall, q: Tensor, k: Tensor, v: Tensor, T: Tensor, A: Tensor, sc: Tensor, h0: Tensor | None,
    o: Tensor | None, ht: Tensor | None, S: Tensor | None, U: Tensor | None, read: Tensor | None,
    long: Tensor | None,
) -> bool:  # fmt: skip
    """`scalar.scan` into ``o``, ``ht``, ``S`` and ``U``, each None unless asked for; whether it was done."""
    t, s = call.table, call.shape
    tiles = t.chunks * s.HV
    inputs = _inputs(call, q, k, read, v, T, A, sc)
    args = (
        *inputs, v if o is None else o,
        inputs[4] if o is None else descriptor(o, s.B * s.T, s.HV * s.V, _C, _BV),
        inputs[2] if S is None else descriptor(S, tiles * s.V, s.K, _BV, _block_k(s.K)),
        inputs[5] if U is None else descriptor(U, tiles * s.V, _C, _BV, _C),
        sc if h0 is None else h0, sc if ht is None else ht, *_index(call, sc), int(h0 is not None), int(ht is not None),
        sc if long is None else long,
    )  # fmt: skip
    rings = _rings(call, read is not None, False)
    meta = {"OUT": o is not None, "SAVE": S is not None, "READ": read is not None}
    return _run(call, ("groups", *meta.values()), 0, meta, rings, args, (q, k, v, h0, t.cu))


def reverse(
    call: ScalarCall, q: Tensor, k: Tensor, do: Tensor, T: Tensor, A: Tensor, sc: Tensor, dht: Tensor | None,
    dh0: Tensor | None, dv: Tensor, X: Tensor, read: Tensor | None, long: Tensor | None,
) -> bool:  # fmt: skip
    """`scalar.reverse` into ``dv`` and ``X``, and ``dh0`` where given; whether it was done."""
    t, s = call.table, call.shape
    args = (
        *_inputs(call, q, k, read, do, T, A, sc), dv, descriptor(dv, s.B * s.T, s.HV * s.V, _C, _BV),
        descriptor(X, t.chunks * s.HV * s.V, s.K, _BV, _block_k(s.K)), sc if dht is None else dht,
        sc if dh0 is None else dh0, *_index(call, sc), int(dht is not None), int(dh0 is not None),
        sc if long is None else long,
    )  # fmt: skip
    rings = _rings(call, read is not None, True)
    meta = {"READ": read is not None}
    return _run(call, ("groups reverse", *meta.values()), 1, meta, rings, args, (q, k, do, dht, dh0, t.cu))
