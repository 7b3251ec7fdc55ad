# SPDX-License-Identifier: MIT
"""Launches of the norm kernels."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fla.modules._norm.kernels import norm_bwd_kernel, norm_fwd_kernel, norm_sum_kernel
from fla.modules._norm.policy import FEW, NormPlan, back_stages, norm_plan
from fla.ops._common.launch import Fixed, Launcher
from fla.ops._common.policy import Chip, chip_of

LAYER, RMS, L2 = 0, 1, 2
NO_GATE, SWISH, SIGMOID, SWISH_FIRST = 0, 1, 2, 3

_forward = Launcher(norm_fwd_kernel)
_backward = Launcher(norm_bwd_kernel)
_sum = Launcher(norm_sum_kernel)


class NormCall(NamedTuple):
    """What is fixed in a call.

    Attributes:
        kind: LAYER, RMS or L2.
        gate: NO_GATE, SWISH, SIGMOID (of the result) or SWISH_FIRST (of the row before it is normalised).
        groups: groups of channels that are normalised by themselves.
        eps: added to the mean of squares (L2: to their sum).
        out_dtype: dtype of the result; that of ``x`` if None.
    """

    kind: int
    gate: int = NO_GATE
    groups: int = 1
    eps: float = 1e-5
    out_dtype: torch.dtype | None = None


@functools.lru_cache(maxsize=1024)
def _forward_launch(
    W: int, G: int, kind: int, gate: int, stream: bool, stats: bool, few: bool, plan: NormPlan | None
) -> tuple[Fixed, int]:
    """The launch and the rows of a tile."""
    plan = plan or norm_plan(W, few)
    meta = {
        "W": W, "G": G, "BR": plan.rows, "BW": plan.width, "KIND": kind, "GATE": gate, "STREAM": stream, "STATS": stats
    }  # fmt: skip
    return _forward.fix(meta, {"num_warps": plan.forward.warps}), plan.rows


@functools.lru_cache(maxsize=1024)
def _backward_launch(
    W: int, G: int, kind: int, gate: int, dw: bool, db: bool, dres: bool, again: bool, done: bool, few: bool,
    chip: Chip, bytes_each: int, plan: NormPlan | None,
) -> tuple[Fixed, NormPlan]:  # fmt: skip
    plan = plan or norm_plan(W, few)
    meta = {
        "W": W, "G": G, "BR": plan.back_rows, "BW": plan.width, "KIND": kind, "GATE": gate, "DW": dw, "DB": db,
        "DRES": dres, "AGAIN": again, "DONE": done, "STAGES": back_stages(plan, chip, bytes_each),
    }  # fmt: skip
    return _backward.fix(meta, {"num_warps": plan.backward.warps}), plan


@functools.lru_cache(maxsize=256)
def _sum_launch(D: int, dw: bool, db: bool) -> tuple[Fixed, int]:
    rows = 32 if D > 1024 else 128
    return _sum.fix({"D": D, "BP": rows, "BD": 32, "DW": dw, "DB": db}, {"num_warps": 4}), -(-D // 32)


def norm_forward(
    call: NormCall, x: Tensor, w: Tensor | None, b: Tensor | None, res: Tensor | None, g: Tensor | None,
    stream_dtype: torch.dtype | None = None, stats: bool = False, plan: NormPlan | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """``(y, stream, mean, rstd)`` of contiguous tensors ``[..., D]``.

    ``stream``, the sum of ``x`` and the residual, comes with ``stream_dtype`` only, the float32 statistics with
    ``stats``.
    """
    kind, gate, G, eps, out_dtype = call
    y = torch.empty_like(x) if out_dtype is None else torch.empty_like(x, dtype=out_dtype)
    stream = None if stream_dtype is None else torch.empty_like(x, dtype=stream_dtype)
    n = x.numel()
    mean = rstd = None
    rows = n // x.shape[-1] if n else 0
    if stats:
        rstd = torch.empty(rows * G, dtype=torch.float32, device=x.device)
        mean = torch.empty_like(rstd) if kind == LAYER else None
    if n:
        launch, tile = _forward_launch(
            x.shape[-1] // G, G, kind, gate, stream is not None, stats, n < FEW, plan
        )  # fmt: skip
        launch(-(-rows // tile) * G, (x, res, g, w, b, y, stream, mean, rstd, rows, eps), (x, res, g, w, b, y, stream))
    return y, stream, mean, rstd


def norm_backward(
    call: NormCall, dy: Tensor, ds: Tensor | None, s: Tensor, w: Tensor | None, b: Tensor | None, g: Tensor | None,
    x_dtype: torch.dtype, res_dtype: torch.dtype | None = None, dw_needed: bool = True, db_needed: bool = True,
    again: bool = False, mean: Tensor | None = None, rstd: Tensor | None = None, normalised: bool = False,
    plan: NormPlan | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients ``(dx, dresidual, dg, dw, db, y)`` from contiguous tensors.

    ``s`` is what was normalised, ``x`` or the residual stream. ``res_dtype``: dtype of a residual whose gradient is
    wanted. ``y``, the forward's result in ``x_dtype``, comes with ``again`` only. ``normalised``: ``s`` is what came
    out of the norm, before weight, bias and gate; needs ``rstd``.
    """
    kind, gate, G, eps, _ = call
    D = s.shape[-1]
    dx = torch.empty_like(s) if s.dtype == x_dtype else torch.empty_like(s, dtype=x_dtype)
    dres = own_res = None
    if res_dtype is not None:
        dres = dx if res_dtype == x_dtype else torch.empty_like(s, dtype=res_dtype)
        own_res = None if dres is dx else dres
    dg = None if g is None else torch.empty_like(g)
    y = torch.empty_like(dx) if again else None
    n = s.numel()
    has_dw, has_db = w is not None and dw_needed, b is not None and db_needed
    # Two of the few conditional allocations: an empty input has sums of nothing.
    make: Any = torch.empty_like if n else torch.zeros_like
    dw, db = make(w) if has_dw else None, make(b) if has_db else None
    if n == 0:
        return dx, dres, dg, dw, db, y
    rows = n // D
    chip = chip_of(s.device)
    each = s.itemsize + dy.itemsize + (0 if ds is None else ds.itemsize) + (0 if g is None else g.itemsize)
    launch, plan = _backward_launch(
        D // G, G, kind, gate, has_dw, has_db, own_res is not None, again, normalised, n < FEW, chip, each, plan
    )  # fmt: skip
    programs = -(-rows // plan.back_rows)
    part = None
    if has_dw or has_db:
        programs = min(programs, max(1, plan.per_sm * chip.sms // G))
        part = torch.empty((has_dw + has_db) * programs * D, dtype=torch.float32, device=s.device)
    launch(
        programs * G,
        (s, dy, ds, g, w, b, mean, rstd, dx, own_res, dg, y, part, rows, programs, eps),
        (s, dy, ds, g, w, b, rstd, dx, own_res),
    )
    if part is not None:
        total, grid = _sum_launch(D, has_dw, has_db)
        total(grid, (part, dw, db, programs), (part, dw, db))
    return dx, dres, dg, dw, db, y
