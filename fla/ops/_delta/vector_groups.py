# SPDX-License-Identifier: MIT
"""Host side of KDA's state passes in Gluon (`kernels.vector_groups`): when they run, and their launches."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fla.ops._common import gluon
from fla.ops._common.launch import Fixed, Launcher, descriptor

if TYPE_CHECKING:
    from fla.ops._delta.vector_work import Work

_OPTIONS = {"num_warps": 4}
# Columns of V of a group, and tokens of a step.
_BV, _C = 64, 32
# Steps that are on their way or worked on.
_PLACES = 3


@functools.lru_cache(maxsize=1)
def _kernels() -> tuple[Launcher, Launcher]:
    """Launchers of the scan and the reverse scan."""
    from fla.ops._delta.kernels.vector_groups import vector_groups
    from fla.ops._delta.kernels.vector_groups_reverse import vector_groups_reverse

    return Launcher(vector_groups), Launcher(vector_groups_reverse)


def serve(work: Work, saves: bool) -> bool:
    """Whether a state pass of a call runs here. ``saves``: it writes states. Where pairs of groups fill the chip such a
    pass waits for memory, and Triton's is as fast (states 0.488 ms against 0.497 at B1 T8192 H96, reverse 0.624 against
    0.623)."""
    p = work.plan
    fits = p.groups == 1 or (p.groups > 1 and not saves)
    return fits and p.segments == 1 and work.call.part != 2 and gluon.why_not() is None


def _inputs(work: Work, v: Tensor) -> tuple[Any, ...]:
    """Descriptors of tiles, score matrices, values or gradients of the output, and decays."""
    K, n = work.K, work.tiles_n
    return (
        descriptor(work.tiles, n * 192, K, _C, K), descriptor(work.mats, n * 64 * work.nm, _C, _C, _C),
        descriptor(v, work.B * work.T, work.H * work.V, _C, _BV), descriptor(work.decay, n * 2, K, 1, K),
    )  # fmt: skip


def _run(work: Work, which: int, part: dict[str, Any], args: tuple[Any, ...], given: tuple[Tensor | None, ...]) -> bool:
    """Whether the pass was launched; if not, Triton's kernel has to do it."""
    groups, launches = work.plan.groups, work.setup.launches
    try:
        key = ("groups", which, *part.values())
        run: Fixed | None = launches.get(key)
        if run is None:
            meta = {
                "K": work.K, "V": work.V, **part, "VFIRST": work.call.v_first, "VARLEN": work.table.varlen,
                "TAIL": work.ragged, "WATCH": work.call.part == 1, "N": _PLACES,
            }  # fmt: skip
            run = launches[key] = _kernels()[which].fix(meta, _OPTIONS)
        run(work.V // (_BV * groups) * work.H * work.N, args, given)
    except Exception as error:
        if not gluon.gave_up(error):
            raise
        return False
    return True


def _index(work: Work) -> tuple[Any, ...]:
    cu, offsets = work.index
    x = work.decay
    return x if cu is None else cu, x if offsets is None else offsets, work.T, work.table.per_sequence, work.H


def scan(
    work: Work, h0: Tensor | None, o: Tensor | None, ht: Tensor | None, states: Tensor | None, news: Tensor | None
) -> bool:
    """`Work.scan` into ``o``, ``ht``, ``states`` and ``news``, each None unless asked for; whether it was done."""
    V, K, n, x = work.V, work.K, work.tiles_n, work.decay
    inputs = _inputs(work, work.v)
    args = (
        x if o is None else o, *inputs,
        inputs[2] if o is None else descriptor(o, work.B * work.T, work.H * V, _C, _BV),
        inputs[0] if states is None else descriptor(states, n * 2 * V, K, _BV, K),
        inputs[1] if news is None else descriptor(news, n * V, 64, _BV, _C),
        x if h0 is None else h0, x if ht is None else ht, *_index(work), int(h0 is not None), int(ht is not None),
        x if work.long is None else work.long,
    )  # fmt: skip
    part = {"NM": work.nm, "OUT": o is not None, "SAVE": states is not None, "NC": work.plan.groups}
    return _run(work, 0, part, args, (work.v, h0, work.table.cu))


def reverse(
    work: Work, do: Tensor, dv: Tensor, exits: Tensor, ys: Tensor, dht: Tensor | None, dh0: Tensor | None
) -> bool:
    """`Work.scan_bwd` into ``dv``, ``exits``, ``ys`` and ``dh0``; whether it was done."""
    V, K, n, x = work.V, work.K, work.tiles_n, work.decay
    args = (
        dv, *_inputs(work, do), descriptor(dv, work.B * work.T, work.H * V, _C, _BV),
        descriptor(exits, n * 2 * V, K, _BV, K), descriptor(ys, n * V, 64, _BV, _C),
        x if dht is None else dht, x if dh0 is None else dh0, *_index(work), int(dht is not None), int(dh0 is not None),
        x if work.long is None else work.long,
    )  # fmt: skip
    return _run(work, 1, {}, args, (do, dht, dh0, work.table.cu))
