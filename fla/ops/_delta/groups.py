# SPDX-License-Identifier: MIT
"""Host side of the state passes in Gluon (`kernels.scalar_groups`): when they run, and their launches."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fla.ops._common.launch import Fixed, Launcher, descriptor

if TYPE_CHECKING:
    from fla.ops._delta.scalar import ScalarCall

# Versions of Triton that these kernels were run with; Gluon changes between versions.
_VERSIONS = ((3, 6),)
_OPTIONS = {"num_warps": 4}
# Columns of V of a group, and tokens of a step.
_BV = _C = 64


@functools.lru_cache(maxsize=1)
def _kernels() -> tuple[Launcher, Launcher] | None:
    """Launchers of the scan and the reverse scan, or None where this Triton has no Gluon that is known."""
    try:
        import triton

        major, minor = (int(x) for x in triton.__version__.split(".")[:2])
        if (major, minor) not in _VERSIONS:
            return None
        from fla.ops._delta.kernels.scalar_groups import groups_scan
        from fla.ops._delta.kernels.scalar_groups_reverse import groups_reverse
    except ImportError:
        return None
    return Launcher(groups_scan), Launcher(groups_reverse)


def serve(call: ScalarCall, again: bool = False) -> bool:
    """Whether a state pass of ``call`` runs here. ``again``: it computes states again with a read key, which Triton's
    kernel does faster (0.347 ms against 0.373 at B1 T8192 H96)."""
    p = call.plan
    return (
        not again
        and p.groups > 0
        and p.descriptors
        and call.part == 0
        and call.segments == 1
        and _kernels() is not None
    )


def _inputs(
    call: ScalarCall, q: Tensor, k: Tensor, read: Tensor | None, v: Tensor, T: Tensor, A: Tensor, sc: Tensor
) -> tuple[Any, ...]:
    """The scalars, and descriptors of what a pass reads."""
    t, s = call.table, call.shape
    tiles, rows = t.chunks * s.HV, s.B * s.T
    keys = tuple(descriptor(x, rows, s.H * s.K, _C, s.K) for x in (q, k, k if read is None else read))
    return (
        sc, *keys, descriptor(v, rows, s.HV * s.V, _C, _BV), descriptor(T, tiles * _C, _C, _C, _C),
        descriptor(A, tiles * _C, _C, _C, _C), descriptor(sc, tiles * 8, _C, 4, _C),
    )  # fmt: skip


def _run(call: ScalarCall, key: tuple[Any, ...], which: int, meta: dict[str, Any], rings: tuple[int, int]) -> Fixed:
    run = call.launches.get(key)
    if run is None:
        kernels = _kernels()
        assert kernels is not None
        meta = {
            "K": call.shape.K, "V": call.shape.V, "C": _C, **meta, "VFIRST": call.v_first, "VARLEN": call.table.varlen,
            "TAIL": call.tail, "NA": rings[0], "NB": rings[1], "NC": call.plan.groups,
        }  # fmt: skip
        run = call.launches[key] = kernels[which].fix(meta, _OPTIONS)
    return run


def _rings(call: ScalarCall, wide: tuple[int, int]) -> tuple[int, int]:
    """Places of the two rings without a read key. Two steps on their way are faster than three where two groups work on
    whole chunks (0.255 ms against 0.279); the others were checked and timed with ``wide``."""
    return (2, 2) if call.plan.groups == 2 and not call.tail else wide


def _grid(call: ScalarCall) -> int:
    return call.shape.V // (_BV * call.plan.groups) * call.shape.HV * call.table.sequences


def _index(call: ScalarCall, sc: Tensor) -> tuple[Any, ...]:
    t, s = call.table, call.shape
    return sc if t.cu is None else t.cu, sc if t.offsets is None else t.offsets, s.T, t.per_sequence, s.H, s.HV


def scan(
    call: ScalarCall, q: Tensor, k: Tensor, v: Tensor, T: Tensor, A: Tensor, sc: Tensor, h0: Tensor | None,
    o: Tensor | None, ht: Tensor | None, S: Tensor | None, U: Tensor | None, read: Tensor | None,
) -> None:  # fmt: skip
    """`scalar.scan` into ``o``, ``ht``, ``S`` and ``U``, each None unless asked for."""
    t, s = call.table, call.shape
    tiles = t.chunks * s.HV
    inputs = _inputs(call, q, k, read, v, T, A, sc)
    args = (
        *inputs, v if o is None else o,
        inputs[4] if o is None else descriptor(o, s.B * s.T, s.HV * s.V, _C, _BV),
        inputs[2] if S is None else descriptor(S, tiles * s.V, s.K, _BV, s.K),
        inputs[5] if U is None else descriptor(U, tiles * s.V, _C, _BV, _C),
        sc if h0 is None else h0, sc if ht is None else ht, *_index(call, sc), int(h0 is not None), int(ht is not None),
    )  # fmt: skip
    rings = (3, 2) if read is not None else _rings(call, (3, 3))
    meta = {"OUT": o is not None, "SAVE": S is not None, "READ": read is not None}
    _run(call, ("groups", *meta.values()), 0, meta, rings)(_grid(call), args, (q, k, v, h0, t.cu))


def reverse(
    call: ScalarCall, q: Tensor, k: Tensor, do: Tensor, T: Tensor, A: Tensor, sc: Tensor, dht: Tensor | None,
    dh0: Tensor | None, dv: Tensor, X: Tensor, read: Tensor | None,
) -> None:  # fmt: skip
    """`scalar.reverse` into ``dv`` and ``X``; fills ``dh0`` where given."""
    t, s = call.table, call.shape
    args = (
        *_inputs(call, q, k, read, do, T, A, sc), dv, descriptor(dv, s.B * s.T, s.HV * s.V, _C, _BV),
        descriptor(X, t.chunks * s.HV * s.V, s.K, _BV, s.K), sc if dht is None else dht, sc if dh0 is None else dh0,
        *_index(call, sc), int(dht is not None), int(dh0 is not None),
    )  # fmt: skip
    rings = (2, 2) if read is not None else _rings(call, (2, 3))
    meta = {"READ": read is not None}
    _run(call, ("groups reverse", *meta.values()), 1, meta, rings)(_grid(call), args, (q, k, do, dht, dh0, t.cu))
