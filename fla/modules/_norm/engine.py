# SPDX-License-Identifier: MIT
"""Launches of the norm kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fla.modules._norm.kernels import norm_bwd_kernel, norm_fwd_kernel, norm_sum_kernel
from fla.modules._norm.policy import NormPlan, norm_plan
from fla.ops._common.launch import Launcher
from fla.ops._common.policy import chip_of

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
        stream_dtype: dtype in which ``x + residual`` is returned; None if it is not.
    """

    kind: int
    gate: int = NO_GATE
    groups: int = 1
    eps: float = 1e-5
    out_dtype: torch.dtype | None = None
    stream_dtype: torch.dtype | None = None


class NormResult(NamedTuple):
    """``mean`` and ``rstd`` are float32, one for each row and group."""

    y: Tensor
    stream: Tensor | None
    mean: Tensor | None
    rstd: Tensor | None


def norm_forward(
    call: NormCall, x: Tensor, w: Tensor | None, b: Tensor | None, res: Tensor | None, g: Tensor | None, stats: bool,
    plan: NormPlan | None = None,
) -> NormResult:  # fmt: skip
    """The norm of contiguous tensors ``[..., D]``; ``stats`` keeps what the backward needs."""
    D = x.shape[-1]
    W = D // call.groups
    y = torch.empty_like(x, dtype=call.out_dtype)
    stream = None if call.stream_dtype is None else torch.empty_like(x, dtype=call.stream_dtype)
    if x.numel() == 0:
        nothing = x.new_empty(0, dtype=torch.float32) if stats else None
        return NormResult(y, stream, nothing, nothing)
    rows = x.numel() // D
    mean = rstd = None
    if stats:
        size = rows * call.groups
        rstd = torch.empty(size, dtype=torch.float32, device=x.device)
        mean = torch.empty_like(rstd) if call.kind == LAYER else None
    plan = plan or norm_plan(chip_of(x.device), W, rows * call.groups)
    _forward(
        -(-rows // plan.rows) * call.groups,
        (x, res, g, w, b, y, stream, mean, rstd, rows, call.eps),
        {
            "W": W, "G": call.groups, "BR": plan.rows, "BW": plan.width, "KIND": call.kind, "GATE": call.gate,
            "STREAM": stream is not None, "STATS": stats,
        },
        _options(plan.forward),
        (x, res, g, w, b, y, stream),
    )  # fmt: skip
    return NormResult(y, stream, mean, rstd)


def norm_backward(
    call: NormCall, dy: Tensor, ds: Tensor | None, s: Tensor, w: Tensor | None, b: Tensor | None, g: Tensor | None,
    mean: Tensor | None, rstd: Tensor, x_dtype: torch.dtype, res_dtype: torch.dtype | None = None,
    dw_needed: bool = True, db_needed: bool = True, again: bool = False, plan: NormPlan | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients ``(dx, dresidual, dg, dw, db, y)`` from contiguous tensors.

    ``s`` is what was normalised, ``x`` or the residual stream. ``res_dtype``: dtype of a residual whose gradient is
    wanted. ``y``, the forward's result in ``x_dtype``, comes with ``again`` only.
    """
    D = s.shape[-1]
    G = call.groups
    W = D // G
    dx = torch.empty_like(s, dtype=x_dtype)
    dres = None
    if res_dtype is not None:
        dres = dx if res_dtype == x_dtype else torch.empty_like(s, dtype=res_dtype)
    dg = None if g is None else torch.empty_like(g)
    y = torch.empty_like(dx) if again else None
    has_dw, has_db = w is not None and dw_needed, b is not None and db_needed
    if s.numel() == 0:
        dw = torch.zeros_like(w) if w is not None and has_dw else None
        db = torch.zeros_like(b) if b is not None and has_db else None
        return dx, dres, dg, dw, db, y
    rows = s.numel() // D
    plan = plan or norm_plan(chip_of(s.device), W, rows * G)
    tiles = -(-rows // plan.back_rows)
    sums = int(has_dw) + int(has_db)
    programs = min(tiles, max(1, plan.programs // G)) if sums else tiles
    part = torch.empty(sums * programs * D, dtype=torch.float32, device=s.device) if sums else None
    own_res = dres is not None and dres is not dx
    _backward(
        programs * G,
        (dy, ds, s, g, w, b, mean, rstd, dx, dres if own_res else None, dg, y, part, rows, programs),
        {
            "W": W, "G": G, "BR": plan.back_rows, "BW": plan.width, "KIND": call.kind, "GATE": call.gate,
            "DW": has_dw, "DB": has_db, "DRES": own_res, "AGAIN": again, "STAGES": plan.backward.stages,
        },
        _options(plan.backward),
        (dy, ds, s, g, w, b, dx, dres if own_res else None),
    )  # fmt: skip
    dw = torch.empty_like(w) if w is not None and has_dw else None
    db = torch.empty_like(b) if b is not None and has_db else None
    if part is not None:
        bp, bd = (32, 32) if D > 1024 else (128, 32)
        _sum(
            -(-D // bd),
            (part, dw, db, programs),
            {"D": D, "BP": bp, "BD": bd, "DW": has_dw, "DB": has_db},
            {"num_warps": 4},
            (part, dw, db),
        )
    return dx, dres, dg, dw, db, y


def _options(launch: Any) -> dict[str, Any]:
    return {"num_warps": launch.warps}
