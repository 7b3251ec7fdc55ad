# SPDX-License-Identifier: MIT
"""Cross entropy of rows of logits, with its gradient: the engine of both losses.

With ``z = c * tanh(s * logits / c)`` (or ``s * logits`` without a cap `c`), ``lse = logsumexp(z)`` and `V` classes,
a row whose target is `t` costs ``lse - (1 - e) z_t - (e / V) sum(z) + lambda * lse ** 2``: label smoothing `e`, and
the z-loss `lambda * lse ** 2` of PaLM (https://arxiv.org/abs/2204.02311, section 5). Ignored rows cost nothing.
The classes may be split evenly over the ranks of a process group, in rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fla.backends import CallFacts, dispatch
from fla.modules._checks import check_beside
from fla.modules._covers import TRANSFORMED
from fla.modules._dtype import accumulation_dtype
from fla.modules._loss import torch_rows
from fla.modules._loss.torch_rows import shard
from fla.ops._common.checks import ArgumentError
from fla.ops._common.single import once, transformed

__all__ = [
    "CrossEntropyLossFunction",
    "FusedCrossEntropyFunction",
    "cross_entropy_bwd",
    "cross_entropy_fwd",
    "cross_entropy_loss",
    "fused_cross_entropy_forward",
]


def check_target(logits: Tensor, target: Tensor, classes: int, ignore_index: int) -> None:
    """Check shape and dtype of the class ids, and their range where looking is free (CPU tensors)."""
    if logits.dim() != 2 or target.shape != logits.shape[:1]:
        raise ArgumentError(
            f"`input` must have shape [N, V] and `target` [N], got {list(logits.shape)} and {list(target.shape)}."
        )
    if target.dtype not in (torch.int64, torch.int32):
        raise ArgumentError(f"`target` must be int64 or int32, got {target.dtype}.")
    check_beside(logits, target=target)
    if target.device.type == "cpu" and not torch.compiler.is_compiling() and target.numel():
        wrong = ((target < 0) | (target >= classes)) & (target != ignore_index)
        if wrong.any():
            raise ArgumentError(
                f"`target` must lie in [0, {classes}) or be ignore_index = {ignore_index}, got {int(target[wrong][0])}."
            )


_FACTS = CallFacts(
    tensors=("logits",), key="logits", value="logits", initial_state=None, state_v_first=None, cu_seqlens=None
)


def covers(logits: Tensor, ignore_index: int) -> tuple[bool, str | None]:
    """Verifier of the Triton path."""
    if transformed():
        return TRANSFORMED
    if logits.dtype == torch.float64:
        return False, "the Triton kernels compute in float32, float64 runs in PyTorch"
    if not -(2**31) <= ignore_index < 2**31:
        return False, f"the Triton kernels compare with an int32 ignore_index, got {ignore_index}"
    return True, None


@dispatch(
    "modules",
    facts=_FACTS,
    triton="fla.modules._loss.entry:cross_entropy_fwd",
    triton_verifier=covers,
    differentiable=False,
)
def cross_entropy_fwd(
    logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    logit_softcapping: float | None = None,
    ignore_index: int = -100,
    process_group: Any = None,
) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """Loss of each row.

    Returns:
        ``loss``, ``z_loss`` (already part of ``loss``) and ``lse``, each ``[N]`` float32 (float64 for float64 logits),
        the number of classes over all ranks, and the first class of this rank.
    """
    return torch_rows.cross_entropy_fwd(
        logits,
        target,
        label_smoothing,
        logit_scale,
        lse_square_scale,
        logit_softcapping,
        ignore_index,
        process_group,
    )


@dispatch(
    "modules",
    facts=_FACTS,
    triton="fla.modules._loss.entry:cross_entropy_bwd",
    triton_verifier=covers,
    differentiable=False,
)
def cross_entropy_bwd(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    dloss: Tensor,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    logit_softcapping: float | None = None,
    ignore_index: int = -100,
    total_classes: int | None = None,
    class_start_idx: int = 0,
    inplace_backward: bool = False,
) -> Tensor:
    """Gradient ``[N, V]`` of the logits in their dtype, written over them with ``inplace_backward``.

    Args:
        logits, target, lse: as given to and returned by :func:`cross_entropy_fwd`.
        dloss: ``[N]``, gradient of each row's loss.
    """
    return torch_rows.cross_entropy_bwd(
        logits,
        target,
        lse,
        dloss,
        label_smoothing,
        logit_scale,
        lse_square_scale,
        logit_softcapping,
        ignore_index,
        total_classes,
        class_start_idx,
        inplace_backward,
    )


Run = tuple[Callable[..., Any], Callable[..., Tensor]]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, options: dict[str, Any], inplace: bool, process_group: Any, run: Run
    ) -> tuple[Tensor, Tensor]:
        loss, z_loss, lse, total, start = run[0](logits, target, **options, process_group=process_group)
        ctx.save_for_backward(logits, target, lse)
        ctx.options = {**options, "total_classes": total, "class_start_idx": start, "inplace_backward": inplace}
        ctx.bwd = run[1]
        ctx.mark_non_differentiable(z_loss)
        return loss, z_loss

    @staticmethod
    @once
    def backward(ctx: Any, dloss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, lse = ctx.saved_tensors
        # Writing over the saved logits is what the caller asked for; detached, autograd does not object.
        return ctx.bwd(logits.detach(), target, lse, dloss, **ctx.options), None, None, None, None, None


def differentiable(
    logits: Tensor, target: Tensor, options: dict[str, Any], inplace: bool, process_group: Any, run: Run
) -> tuple[Tensor, Tensor]:
    """``loss`` and ``z_loss`` by the two functions of ``run``, with autograd."""
    return _CrossEntropy.apply(logits, target, options, inplace, process_group, run)


def _check(logits: Tensor, target: Tensor, ignore_index: int, process_group: Any) -> None:
    check_target(logits, target, shard(logits, process_group).total, ignore_index)


def _outputs(logits: Tensor) -> tuple[Tensor, Tensor]:
    wide = accumulation_dtype(logits.dtype)
    return logits.new_empty(logits.shape[0], dtype=wide), logits.new_empty(logits.shape[0], dtype=wide)


class _Pair:
    """Forward and backward of :func:`cross_entropy_loss` for torch.compile, where logits are never written over."""

    @staticmethod
    def _options(args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args[2:7]

    def forward(self, *args: Any) -> tuple[tuple[Tensor, Tensor], Sequence[Tensor]]:
        loss, z_loss, lse, _, _ = cross_entropy_fwd(args[0], args[1], *self._options(args))
        return (loss, z_loss), (lse,)

    def saved(self, *args: Any) -> Sequence[Tensor]:
        return (_outputs(args[0])[0],)

    def backward(
        self,
        args: tuple[Any, ...],
        saved: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        needed: Sequence[bool],
    ) -> Sequence[Tensor | None]:
        if grads[0] is None or not needed[0]:
            return (None, None)
        return (cross_entropy_bwd(args[0], args[1], saved[0], grads[0], *self._options(args)), None)


@dispatch(
    "modules",
    facts=_FACTS,
    validate=_check,
    outputs=_outputs,
    triton="fla.modules._loss.entry:cross_entropy_loss",
    triton_verifier=covers,
)
def cross_entropy_loss(
    logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    logit_softcapping: float | None = None,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Cross entropy of each row.

    Args:
        logits: ``[N, V]``; with ``process_group`` this rank's equal share of the classes.
        target: ``[N]``, int64 or int32, class ids over all ranks, or ``ignore_index``.
        label_smoothing: mass spread evenly over all classes.
        logit_scale: factor on the logits.
        lse_square_scale: weight of the z-loss ``lse ** 2``.
        logit_softcapping: cap `c` of ``c * tanh(logits / c)``, applied after the scale.
        ignore_index: target of rows that cost nothing.
        inplace_backward: the backward pass overwrites ``logits`` with their gradient.
        process_group: ranks that share the classes.

    Returns:
        ``loss`` and ``z_loss`` ``[N]``, float32. The z-loss is part of the loss and carries no gradient of its own.

    Raises:
        ArgumentError: shapes or dtypes that do not fit, or (on the CPU) a target that is not a class.
    """
    options = {
        "label_smoothing": label_smoothing,
        "logit_scale": logit_scale,
        "lse_square_scale": lse_square_scale,
        "logit_softcapping": logit_softcapping,
        "ignore_index": ignore_index,
    }
    run = (torch_rows.cross_entropy_fwd, torch_rows.cross_entropy_bwd)
    return differentiable(logits, target, options, inplace_backward, process_group, run)


cross_entropy_loss.op.pair = _Pair()  # type: ignore[attr-defined]


class FusedCrossEntropyFunction:
    """``apply`` takes the arguments of :func:`cross_entropy_loss` in order."""

    apply = staticmethod(cross_entropy_loss)


# The names of earlier releases.
CrossEntropyLossFunction = FusedCrossEntropyFunction
fused_cross_entropy_forward = cross_entropy_fwd
