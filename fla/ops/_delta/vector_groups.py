# SPDX-License-Identifier: MIT
"""Host side of KDA's state passes in Gluon (`kernels.vector_groups`): when they run, and their launches."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fla.ops._common import gluon
from fla.ops._common.launch import Fixed, Launcher, descriptor
from fla.ops._delta.vector_launch import one_matrices

if TYPE_CHECKING:
    from fla.ops._delta.vector_work import Gradients, Work

_OPTIONS = {"num_warps": 4}
# Columns of V of a group, and tokens of a step.
_BV, _C = 64, 32
# Steps that are on their way or worked on.
_PLACES = 3


@functools.lru_cache(maxsize=1)
def _kernels() -> tuple[Launcher, Launcher, Launcher]:
    """Launchers of the scan, the reverse scan and the gradients."""
    from fla.ops._delta.kernels.vector_groups import vector_groups
    from fla.ops._delta.kernels.vector_groups_grad import vector_groups_grad
    from fla.ops._delta.kernels.vector_groups_reverse import vector_groups_reverse

    return Launcher(vector_groups), Launcher(vector_groups_reverse), Launcher(vector_groups_grad)


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


def _run(
    work: Work, which: int, meta: dict[str, Any], grid: int, args: tuple[Any, ...], given: tuple[Tensor | None, ...]
) -> bool:
    """Whether the kernel was launched; if not, Triton's has to do its work."""
    launches = work.setup.launches
    try:
        key = ("groups", which, *meta.values())
        run: Fixed | None = launches.get(key)
        if run is None:
            run = launches[key] = _kernels()[which].fix(meta, _OPTIONS)
        run(grid, args, given)
    except Exception as error:
        if not gluon.gave_up(error):
            raise
        return False
    return True


def _pass(work: Work, part: dict[str, Any]) -> dict[str, Any]:
    """Constants of a pass over the states, ``part`` of which are its own."""
    return {
        "K": work.K, "V": work.V, **part, "VFIRST": work.call.v_first, "VARLEN": work.table.varlen,
        "TAIL": work.ragged, "WATCH": work.call.part == 1, "N": _PLACES,
    }  # fmt: skip


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
    groups = work.plan.groups
    meta = _pass(work, {"NM": work.nm, "OUT": o is not None, "SAVE": states is not None, "NC": groups})
    return _run(work, 0, meta, V // (_BV * groups) * work.H * work.N, args, (work.v, h0, work.table.cu))


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
    return _run(work, 1, _pass(work, {}), V // _BV * work.H * work.N, args, (do, dht, dh0, work.table.cu))


def serve_grad(work: Work) -> bool:
    """Whether chunks of weak gates get their gradients here. Where the gate is made in the kernel, Triton's is faster
    (1.71 ms against 1.75 at B1 T8192 H96): two groups then compute for longer than memory takes."""
    s = work.setup
    fits = s.plan.groups > 0 and work.K == work.V == 128 and work.H == work.HK and not s.erase and work.call.part == 0
    fits = fits and work.call.gate == 0 and work.g.dtype == work.q.dtype and work.g.data_ptr() & 15 == 0
    return fits and gluon.why_not() is None


def grad(
    work: Work, do: Tensor, states: Tensor, news: Tensor, exits: Tensor, ys: Tensor, scores: Tensor, vecs: Tensor,
    r: Gradients,
) -> bool:  # fmt: skip
    """`Work.grad` of such chunks into ``r``, after the scores; whether it was done."""
    n, x, rows = work.tiles_n, work.decay, work.B * work.T

    def chunks(t: Tensor) -> Any:
        return descriptor(t, rows, work.H * 128, _C, 64)

    args = (
        work.beta, descriptor(states, n * 256, 128, 128, 64), descriptor(exits, n * 256, 128, 128, 64), chunks(do),
        descriptor(ys, n * 128, 64, 128, _C), descriptor(news, n * 128, 64, 128, _C),
        descriptor(scores, n * 128, _C, 64, _C), chunks(work.q), chunks(work.k), chunks(work.g),
        descriptor(one_matrices(work.q.dtype, x.device), 512, 64, _C, _C), work.norms, vecs, r.dq, chunks(r.dq), r.dk,
        chunks(r.dk), r.dg, chunks(r.dg), r.db, x if work.table.rows is None else work.table.rows, work.T,
        work.table.per_sequence, work.H, n * 2, rows, work.call.scale,
    )  # fmt: skip
    meta = {
        "BETA": work.call.beta, "NORM": work.call.norm, "FREE": work.some, "VARLEN": work.table.varlen,
        "ROWS": work.ragged, "PARTS": work.setup.parts,
    }  # fmt: skip
    return _run(work, 2, meta, min(work.chip.sms, n * 2), args, (work.q, work.g, work.beta, do))
