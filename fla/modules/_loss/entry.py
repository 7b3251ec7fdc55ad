# SPDX-License-Identifier: MIT
"""Triton paths of the losses; same parameters as the public functions, which have checked them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fla.modules._loss import launch
from fla.modules._loss.torch_rows import add_warp, join, shard

Rows = tuple[Tensor, Tensor, Tensor, int, int]


def cross_entropy_fwd(
    logits: Tensor, target: Tensor, label_smoothing: float = 0.0, logit_scale: float = 1.0,
    lse_square_scale: float = 0.0, logit_softcapping: float | None = None, ignore_index: int = -100,
    process_group: Any = None,
) -> Rows:  # fmt: skip
    logits = launch.rows_of(logits)
    total, first = shard(logits, process_group)
    options = launch.Options(label_smoothing, logit_scale, lse_square_scale, logit_softcapping, ignore_index)
    loss, z_loss, lse = launch.cross_entropy(logits, target, options, total, first, parts=process_group is not None)
    if process_group is not None:
        loss, z_loss, lse = join(lse, loss, target, lse_square_scale, ignore_index, process_group)
    return loss, z_loss, lse, total, first


def cross_entropy_bwd(
    logits: Tensor, target: Tensor, lse: Tensor, dloss: Tensor, label_smoothing: float = 0.0, logit_scale: float = 1.0,
    lse_square_scale: float = 0.0, logit_softcapping: float | None = None, ignore_index: int = -100,
    total_classes: int | None = None, class_start_idx: int = 0, inplace_backward: bool = False,
) -> Tensor:  # fmt: skip
    rows = launch.rows_of(logits)
    total = rows.shape[1] if total_classes is None else total_classes
    options = launch.Options(label_smoothing, logit_scale, lse_square_scale, logit_softcapping, ignore_index)
    grad = rows if inplace_backward or rows is not logits else torch.empty_like(rows)
    launch.cross_entropy(rows, target, options, total, class_start_idx, lse=lse, dloss=dloss, grad=grad)
    return logits.copy_(grad) if inplace_backward and grad is not logits else grad


def chunk_(
    logits: Tensor, target: Tensor, options: dict[str, Any], each: Tensor | None, warp: float | None,
    process_group: Any,
) -> Tensor:  # fmt: skip
    """As :func:`fla.modules._loss.torch_rows.chunk_`."""
    settings = launch.Options(**options)
    total, first = shard(logits, process_group)
    if process_group is None:
        if each is None:
            return launch.cross_entropy(logits, target, settings, total, first)[0]
        return launch.cross_entropy(
            logits, target, settings, total, first, dloss=each, grad=logits, warp=warp
        )[0]  # fmt: skip
    losses, _, lse, *_ = cross_entropy_fwd(logits, target, **options, process_group=process_group)
    if each is not None:
        peak = None if warp is None else logits.max(-1)
        launch.cross_entropy(logits, target, settings, total, first, lse=lse, dloss=each, grad=logits)
        if peak is not None and warp is not None:
            add_warp(logits, (peak[0], peak[1]), warp, process_group)
    return losses


def divergence_(student: Tensor, teacher: Tensor, scale: float, need_grad: bool) -> Tensor:
    """As :func:`fla.modules._loss.torch_rows.divergence_`."""
    return launch.divergence(student, teacher, scale, need_grad)


def cross_entropy_loss(
    logits: Tensor, target: Tensor, label_smoothing: float = 0.0, logit_scale: float = 1.0,
    lse_square_scale: float = 0.0, logit_softcapping: float | None = None, ignore_index: int = -100,
    inplace_backward: bool = False, process_group: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from fla.modules.fused_cross_entropy.ops import differentiable

    options = launch.Options(label_smoothing, logit_scale, lse_square_scale, logit_softcapping, ignore_index)
    run = (cross_entropy_fwd, cross_entropy_bwd)
    return differentiable(logits, target, vars(options), inplace_backward, process_group, run)


def fused_linear_cross_entropy_loss(
    x: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, logit_scale: float = 1.0, logit_softcapping: float | None = None,
    num_chunks: int = 8, reduction: str = "mean", use_l2warp: bool = False, l2_penalty_factor: float = 1e-4,
    accumulate_grad_in_fp32: bool = True, process_group: Any = None,
) -> Tensor:  # fmt: skip
    from fla.modules.fused_linear_cross_entropy.ops import Settings, differentiable

    settings = Settings(
        ignore_index, label_smoothing, logit_scale, logit_softcapping, num_chunks, reduction, use_l2warp,
        l2_penalty_factor, accumulate_grad_in_fp32, process_group,
    )  # fmt: skip
    return differentiable(x, target, weight, bias, settings, None)


def fused_kl_div_loss(
    x: Tensor, target_x: Tensor, weight: Tensor, target_weight: Tensor, reduction: str = "batchmean",
    accumulate_grad_in_fp32: bool = True,
) -> Tensor:  # fmt: skip
    from fla.modules.fused_kl_div.ops import differentiable

    return differentiable(x, target_x, weight, target_weight, reduction, accumulate_grad_in_fp32, divergence_)
