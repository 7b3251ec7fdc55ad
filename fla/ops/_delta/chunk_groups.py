# SPDX-License-Identifier: MIT
"""Host side of what is local to a chunk in Gluon: the first stage and the gradients of whole chunks."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fla.ops._common import gluon
from fla.ops._common.launch import Fixed, Launcher, descriptor

if TYPE_CHECKING:
    from fla.ops._delta.scalar import Gradients, Passed, ScalarCall

_C = 64
# Programs a multiprocessor of the first stage: registers allow three of 168 a thread. Four of 128 are slower (0.262 ms
# against 0.249 at B1 T8192 H96), because what they spill costs more than the fourth gives.
_EACH = 3


@functools.lru_cache(maxsize=1)
def _kernels() -> tuple[Launcher, Launcher]:
    """Launchers of the first stage and of the gradients."""
    from fla.ops._delta.kernels.scalar_groups_grad import groups_grad
    from fla.ops._delta.kernels.scalar_groups_prep import groups_prep

    return Launcher(groups_prep), Launcher(groups_grad)


def serve_prepare(call: ScalarCall) -> bool:
    """Whether the first stage of ``call`` runs here."""
    return call.plan.chunk_groups and call.norm and call.part == 0 and gluon.why_not() is None


def serve_gradients(call: ScalarCall) -> bool:
    """Whether gradients of whole chunks of ``call`` run here."""
    return call.plan.chunk_groups and call.shape.K == call.shape.V and call.part == 0 and gluon.why_not() is None


def _run(
    call: ScalarCall, key: tuple[Any, ...], which: int, meta: dict[str, Any], options: dict[str, Any], programs: int,
    args: tuple[Any, ...], given: tuple[Tensor | None, ...],
) -> bool:  # fmt: skip
    """Whether the kernel was launched; if not, Triton's has to do it."""
    try:
        run: Fixed | None = call.launches.get(key)
        if run is None:
            run = call.launches[key] = _kernels()[which].fix(meta, options)
        run(programs, args, given)
    except Exception as error:
        if not gluon.gave_up(error):
            raise
        return False
    return True


def _keys(call: ScalarCall, q: Tensor, k: Tensor, read: Tensor | None) -> tuple[Any, ...]:
    s = call.shape
    return tuple(descriptor(x, s.B * s.T, s.H * s.K, _C, s.K) for x in (q, k, k if read is None else read))


def _gate(g: Tensor | None, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> tuple[Any, ...]:
    """The gate's arguments and its mode, see `scalar_prep`."""
    mode = 0 if g is None else (1 if A_log is None else 2)
    return beta if g is None else g, beta if A_log is None else A_log, beta if dt_bias is None else dt_bias, mode


def prepare(
    call: ScalarCall, q: Tensor, k: Tensor, g: Tensor | None, beta: Tensor, A_log: Tensor | None,
    dt_bias: Tensor | None, save: bool, read: Tensor | None, T: Tensor, A: Tensor, sc: Tensor,
) -> bool:  # fmt: skip
    """`scalar.prepare` into ``T``, ``A`` and ``sc``; whether it was done."""
    t, s = call.table, call.shape
    tiles = t.chunks * s.HV
    gate, rate, bias, mode = _gate(g, beta, A_log, dt_bias)
    programs = min(tiles, call.chip.sms * _EACH)
    args = (
        gate, *_keys(call, q, k, read), beta, rate, bias, descriptor(T, tiles * _C, _C, _C, _C),
        descriptor(A, tiles * _C, _C, _C, _C), sc, sc if t.rows is None else t.rows, tiles, programs, s.T,
        t.per_sequence, s.H, s.HV, call.scale, call.beta_scale, int(save),
    )  # fmt: skip
    meta = {
        "K": s.K, "C": _C, "GATE": mode, "BIAS": dt_bias is not None, "SIGMOID": call.beta_scale > 0,
        "READ": read is not None, "BEFORE": call.before, "VARLEN": t.varlen,
    }  # fmt: skip
    options = {"num_warps": 4, "maxnreg": 168}
    return _run(
        call, ("groups prep", *meta.values()), 0, meta, options, programs, args, (q, k, g, beta, A_log, dt_bias)
    )


def gradients(
    call: ScalarCall, q: Tensor, k: Tensor, g: Tensor | None, beta: Tensor, A_log: Tensor | None,
    dt_bias: Tensor | None, do: Tensor, passed: Passed, read: Tensor | None, r: Gradients,
) -> bool:  # fmt: skip
    """The whole chunks of `scalar.gradients` into ``r``, not the ragged ones; whether it was done."""
    t, s = call.table, call.shape
    tiles, rows = t.chunks * s.HV, s.B * s.T
    sc = passed.sc
    gate, rate, bias, mode = _gate(g, beta, A_log, dt_bias)
    programs = min(tiles, call.chip.sms)
    args = (
        sc, *_keys(call, q, k, read), descriptor(do, rows, s.HV * s.V, _C, s.V),
        descriptor(passed.dv, rows, s.HV * s.V, _C, s.V), descriptor(passed.U, tiles * s.V, _C, s.V, _C),
        descriptor(passed.S, tiles * s.V, s.K, s.V, s.K), descriptor(passed.X, tiles * s.V, s.K, s.V, s.K),
        descriptor(sc, tiles * 8, _C, 4, _C), gate, rate, bias,
        *(descriptor(x, rows, s.HV * s.K, _C, s.K) for x in (r.dq, r.dk, r.dk if r.dread is None else r.dread)),
        r.dbeta if r.dg is None else r.dg, r.dbeta, sc if r.dy is None else r.dy, sc if t.rows is None else t.rows,
        tiles, programs, s.T, t.per_sequence, s.H, s.HV, call.scale**-2 if call.scale else 0.0,
        1.0 / call.beta_scale if call.beta_scale else 0.0,
    )  # fmt: skip
    meta = {
        "K": s.K, "V": s.V, "C": _C, "NORM": call.norm, "DECAY": mode, "BIAS": dt_bias is not None,
        "READ": read is not None, "BEFORE": call.before, "VARLEN": t.varlen, "TAIL": call.tail,
    }  # fmt: skip
    given = (q, k, do, g, beta, A_log, dt_bias, t.cu)
    return _run(call, ("groups grad", *meta.values()), 1, meta, {"num_warps": 4}, programs, args, given)
