# SPDX-License-Identifier: MIT
"""How the loss kernels are launched. Arguments have been checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fla.modules._loss import kernels
from fla.ops._common.launch import Launcher, on_device

_ce, _kl, _scale = (
    Launcher(kernels.cross_entropy_rows),
    Launcher(kernels.divergence_rows),
    Launcher(kernels.scale_unless_one),
)


@dataclass(frozen=True)
class RowPlan:
    """Tile ``[R, C]`` and warps. `C` is 16 bytes of logits for each thread where there are that many classes."""

    R: int
    C: int
    warps: int


def row_plan(V: int, itemsize: int, warps: int = 8, R: int = 4) -> RowPlan:
    """Plan for rows of ``V`` classes, cut down to what so many need."""
    each = max(1, 16 // itemsize)
    while warps > 1 and warps * 32 * each > V:
        warps //= 2
    C = warps * 32 * each
    while R > 1 and R * C > 2 * V:
        R //= 2
    return RowPlan(R, C, warps)


@dataclass(frozen=True)
class Options:
    """Settings of the cross entropy; see :mod:`fla.modules.fused_cross_entropy.ops`."""

    label_smoothing: float = 0.0
    logit_scale: float = 1.0
    lse_square_scale: float = 0.0
    logit_softcapping: float | None = None
    ignore_index: int = -100


def rows_of(logits: Tensor) -> Tensor:
    """``logits`` with the classes of a row side by side; a view where they are."""
    return logits if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.contiguous()


def cross_entropy(
    logits: Tensor, target: Tensor, options: Options, total: int, first: int, *, parts: bool = False,
    lse: Tensor | None = None, dloss: Tensor | None = None, grad: Tensor | None = None, warp: float | None = None,
    plan: RowPlan | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One launch over the rows of ``logits`` ``[N, V]``; returns ``loss``, ``z_loss`` and ``lse`` ``[N]``.

    With ``lse`` given, these are not computed. ``grad`` is written for the gradients ``dloss`` ``[N]`` of the rows'
    losses; it may be ``logits``. ``warp`` adds that factor times the largest logit to its gradient.
    """
    N, V = logits.shape
    if lse is None:
        loss, z_loss, found = (torch.empty(N, dtype=torch.float32, device=logits.device) for _ in range(3))
    else:
        loss = z_loss = logits
        found = lse
    g = logits if grad is None else grad
    v, vv = math.gcd(16, logits.stride(0), g.stride(0)), math.gcd(16, V)
    # A gradient is one pass and wants many programs; a loss adds up, so its tiles are larger; both together are quicker
    # with fewer rows in the cache at a time.
    warps, R = (8, 4) if grad is None else (8, 1) if lse is not None else (16, 4)
    cap = options.logit_softcapping
    if R > 1 and (cap is not None or options.label_smoothing != 0.0 or warp is not None):
        # These keep more of a tile at a time than there are registers.
        warps, R = 8, 2
    p = plan or row_plan(V, logits.element_size(), warps, R)
    args: tuple[Any, ...] = (
        logits, target, loss, z_loss, found, logits if dloss is None else dloss, g, V // vv, logits.stride(0) // v,
        g.stride(0) // v, 0 if dloss is None else dloss.stride(0), total, first, options.ignore_index,
        float(options.logit_scale), float(cap or 1.0), float(options.label_smoothing),
        float(options.lse_square_scale), float(warp or 0.0),
    )  # fmt: skip
    meta = {
        "VEC": v, "VV": vv, "R": p.R, "C": p.C, "LOSS": lse is None, "GRAD": grad is not None, "PARTS": parts,
        "CAP": cap is not None, "SMOOTH": options.label_smoothing != 0.0, "WARP": warp is not None,
    }  # fmt: skip
    with on_device(logits):
        _ce(N, args, meta, {"num_warps": p.warps}, (logits, target, dloss, grad, lse))
    return loss, z_loss, found


def divergence(student: Tensor, teacher: Tensor, scale: float, need_grad: bool, plan: RowPlan | None = None) -> Tensor:
    """``KL(teacher || student)`` of rows ``[N]``; ``need_grad`` writes ``scale`` times its gradient over student."""
    N, V = student.shape
    loss = torch.empty(N, dtype=torch.float32, device=student.device)
    v, vv = math.gcd(16, student.stride(0), teacher.stride(0)), math.gcd(16, V)
    p = plan or row_plan(V, max(student.element_size(), teacher.element_size()), R=2)
    with on_device(student):
        _kl(
            N,
            (student, teacher, loss, V // vv, student.stride(0) // v, teacher.stride(0) // v, float(scale)),
            {"VEC": v, "VV": vv, "R": p.R, "C": p.C, "GRAD": need_grad},
            {"num_warps": p.warps},
            (student, teacher),
        )
    return loss


def scale_(x: Tensor, by: Tensor) -> Tensor:
    """``x *= by`` for a scalar tensor, without traffic where it is one and without waiting for the device."""
    block = 8192
    with on_device(x):
        n = x.numel()
        _scale(-(-n // block), (x, by, n), {"BLOCK": block, "LONG": n >= 2**31}, {"num_warps": 8}, (x, by))
    return x
