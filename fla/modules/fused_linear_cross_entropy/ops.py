# SPDX-License-Identifier: MIT
"""A linear layer and its cross entropy without the whole logits in memory.

The tokens are taken in chunks. The gradients of a chunk are formed while its logits exist, in the forward pass, and
only scaled in the backward pass, so that at most one chunk of logits is alive at a time. The products are torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fla.backends import dispatch
from fla.backends.devices import has_triton_driver
from fla.modules._checks import check_beside
from fla.modules._dtype import accumulation_dtype, autocast_dtype, upcast
from fla.modules._facts import ROWS
from fla.modules._loss import torch_rows
from fla.modules._loss.products import add_weight_grad, linear_, logits_buffer, token_chunks
from fla.modules.fused_cross_entropy.ops import check_target, covers
from fla.ops._common.checks import ArgumentError, check_choice
from fla.ops._common.single import once

__all__ = [
    "fused_linear_cross_entropy_backward",
    "fused_linear_cross_entropy_bwd",
    "fused_linear_cross_entropy_forward",
    "fused_linear_cross_entropy_fwd",
    "fused_linear_cross_entropy_loss",
    "logsumexp_fwd",
]


def logsumexp_fwd(
    x: Tensor, scale: float | None = None, softcapping: float | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """``logsumexp`` over the last axis of ``scale * x``, capped by ``c * tanh(. / c)``; float32 unless ``dtype``."""
    z = upcast(x) if scale is None else upcast(x) * scale
    z = z if softcapping is None else softcapping * torch.tanh(z / softcapping)
    lse = torch.logsumexp(z, -1)
    return lse if dtype is None else lse.to(dtype)


class Settings(NamedTuple):
    """What :func:`fused_linear_cross_entropy_loss` takes besides tensors, in its order."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    logit_scale: float = 1.0
    logit_softcapping: float | None = None
    num_chunks: int = 8
    reduction: str = "mean"
    use_l2warp: bool = False
    l2_penalty_factor: float = 1e-4
    accumulate_grad_in_fp32: bool = True
    process_group: Any = None


class Engine(NamedTuple):
    """What differs between devices: losses and gradients of a chunk of logits, and scaling in place."""

    chunk_: Callable[..., Tensor]
    scale_: Callable[[Tensor, Tensor], Tensor]


TORCH = Engine(torch_rows.chunk_, lambda x, by: x.mul_(by.to(x.dtype)))


def _triton() -> Engine:
    from fla.modules._loss import entry, launch

    return Engine(entry.chunk_, launch.scale_)


def run_chunks(
    x: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    s: Settings,
    needs: tuple[bool, bool, bool],
    engine: Engine,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Loss and, for a loss gradient of one, the gradients of ``x``, ``weight`` and ``bias`` that ``needs`` names."""
    (N, H), V = x.shape, weight.shape[0]
    needs_dx, needs_dw, needs_db = needs[0], needs[1], needs[2] and bias is not None
    dtype = autocast_dtype(x)
    wide = accumulation_dtype(dtype)
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        h, w = x.to(dtype), weight.to(dtype)
        b = None if bias is None else bias.to(dtype)
        divisor = torch.ones((), dtype=wide, device=x.device)
        if s.reduction == "mean":
            divisor = (target != s.ignore_index).sum().clamp(min=1).to(wide)
        each = 1 / divisor if needs_dx or needs_dw or needs_db else None
        losses = torch.zeros(N, dtype=wide, device=x.device)
        dx = torch.empty_like(h, memory_format=torch.contiguous_format) if needs_dx else None
        dw = db = None
        if needs_dw:
            dw = torch.empty(V, H, dtype=wide if s.accumulate_grad_in_fp32 else weight.dtype, device=x.device)
            dw = dw.zero_() if N == 0 else dw
        if needs_db and bias is not None:
            db = torch.zeros_like(bias, dtype=wide if s.accumulate_grad_in_fp32 else bias.dtype)
        options = {
            "label_smoothing": s.label_smoothing,
            "logit_scale": s.logit_scale,
            "lse_square_scale": 0.0,
            "logit_softcapping": s.logit_softcapping,
            "ignore_index": s.ignore_index,
        }
        warp = s.l2_penalty_factor / N if s.use_l2warp and N else None
        # Wide sums of the weight's gradient cost traffic with every chunk, and at the end they stand beside the narrow
        # gradient: so much memory may as well be logits until then.
        room = V * H * weight.dtype.itemsize if dw is not None and dw.dtype != weight.dtype else 0
        chunks = token_chunks(N, H, V, s.num_chunks, dtype.itemsize, room)
        buffer = logits_buffer(chunks[0].stop if chunks else 0, V, dtype, x.device)
        for rows in chunks:
            n = rows.stop - rows.start
            logits = linear_(buffer[:n], h[rows], w, b)
            ones = None if each is None else each.expand(n)
            losses[rows] = engine.chunk_(logits, target[rows], options, ones, warp, s.process_group)
            if dx is not None:
                torch.mm(logits, w, out=dx[rows])
            if dw is not None:
                add_weight_grad(dw, logits, h[rows], first=rows.start == 0)
            if db is not None:
                db += logits.sum(0, dtype=db.dtype)
            del logits
        # Before the gradients are converted: that is when most memory is taken.
        del buffer
        loss = losses.sum() / divisor
        if dx is not None and s.process_group is not None:
            dist.all_reduce(dx, group=s.process_group)
    return (
        loss,
        None if dx is None else dx.to(x.dtype),
        None if dw is None else dw.to(weight.dtype),
        None if db is None or bias is None else db.to(bias.dtype),
    )


def fused_linear_cross_entropy_fwd(
    x: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    logit_softcapping: float | None = None,
    num_chunks: int = 8,
    reduction: str = "mean",
    use_l2warp: bool = False,
    l2_penalty_factor: float = 1e-4,
    accumulate_grad_in_fp32: bool = True,
    process_group: Any = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Loss and, for a loss gradient of one, the gradients of ``x``, ``weight`` and ``bias`` (None without a bias)."""
    settings = Settings(
        ignore_index,
        label_smoothing,
        logit_scale,
        logit_softcapping,
        num_chunks,
        reduction,
        use_l2warp,
        l2_penalty_factor,
        accumulate_grad_in_fp32,
        process_group,
    )
    return run_chunks(x, target, weight, bias, settings, (True, True, True), engine_of(x))


def engine_of(x: Tensor) -> Engine:
    """The engine for tensors like ``x`` where nothing has selected one."""
    return _triton() if has_triton_driver(x.device.type) and x.dtype != torch.float64 else TORCH


def fused_linear_cross_entropy_bwd(
    do: Tensor, dx: Tensor | None, dw: Tensor | None, db: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Scale the gradients by that of the loss. New tensors, so that a retained graph can be run again."""
    scaled = tuple(None if g is None else g * do.to(g.dtype) for g in (dx, dw, db))
    return scaled[0], scaled[1], scaled[2]


# The names of earlier releases.
fused_linear_cross_entropy_forward = fused_linear_cross_entropy_fwd
fused_linear_cross_entropy_backward = fused_linear_cross_entropy_bwd


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        target: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        settings: Settings,
        engine: Engine,
        grad: bool,
    ) -> Tensor:
        need = ctx.needs_input_grad
        ctx.needs = (grad and need[0], grad and need[2], grad and need[3])
        loss, *grads = run_chunks(x, target, weight, bias, settings, ctx.needs, engine)
        ctx.save_for_backward(x, target, weight, bias)
        ctx.settings, ctx.engine, ctx.grads = settings, engine, grads
        return loss

    @staticmethod
    @once
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        # The gradients are handed out, not copied. A retained graph that is run again computes them again.
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            x, target, weight, bias = ctx.saved_tensors
            grads = run_chunks(x, target, weight, bias, ctx.settings, ctx.needs, ctx.engine)[1:]
        dx, dw, db = (None if g is None else ctx.engine.scale_(g, do) for g in grads)
        return dx, None, dw, db, None, None, None


def differentiable(
    x: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings, engine: Engine | None
) -> Tensor:
    """The loss by an engine (None: the Triton kernels), with autograd."""
    # What requires a gradient does so under no_grad too, where none is wanted.
    grad = torch.is_grad_enabled()
    return _LinearCrossEntropy.apply(x, target, weight, bias, settings, engine or _triton(), grad)


class _Pair:
    """Forward and backward for torch.compile: the gradients come with the loss there too."""

    def forward(self, *args: Any) -> tuple[Tensor, Sequence[Tensor]]:
        x, target, weight, bias, *rest = args
        loss, *grads = run_chunks(x, target, weight, bias, Settings(*rest), (True, True, True), engine_of(x))
        return loss, [g for g in grads if g is not None]

    def saved(self, *args: Any) -> Sequence[Tensor]:
        x, _, weight, bias, *_ = args
        return [t.new_empty(t.shape) for t in (x, weight, bias) if t is not None]

    def backward(
        self,
        args: tuple[Any, ...],
        saved: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        needed: Sequence[bool],
    ) -> Sequence[Tensor | None]:
        do = grads[0]
        if do is None:
            return [None] * len(needed)
        found = [None if not n else g * do.to(g.dtype) for g, n in zip(saved, (needed[0], *needed[2:]), strict=True)]
        return [found[0], None, *found[1:]]


def _check(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    reduction: str,
    ignore_index: int,
    process_group: Any,
) -> None:
    check_choice("reduction", reduction, ("mean", "sum"))
    if x.dim() != 2 or weight is None or weight.dim() != 2 or weight.shape[1] != x.shape[1]:
        raise ArgumentError(
            f"`x` must have shape [N, H] and `weight` [V, H], got {list(x.shape)} and "
            f"{None if weight is None else list(weight.shape)}."
        )
    V = weight.shape[0]
    if bias is not None and bias.shape != (V,):
        raise ArgumentError(f"`bias` must have shape [V] with V = {V}, got {list(bias.shape)}.")
    check_beside(x, weight=weight, bias=bias)
    ranks = 1 if process_group is None else dist.get_world_size(process_group)
    check_target(x, target, V * ranks, ignore_index)


def _outputs(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=accumulation_dtype(autocast_dtype(x)))


def _covers(x: Tensor, weight: Tensor, ignore_index: int) -> tuple[bool, str | None]:
    return covers(x, ignore_index)


@dispatch(
    "modules",
    facts=ROWS,
    validate=_check,
    outputs=_outputs,
    triton="fla.modules._loss.entry:fused_linear_cross_entropy_loss",
    triton_verifier=_covers,
)
def fused_linear_cross_entropy_loss(
    x: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    logit_softcapping: float | None = None,
    num_chunks: int = 8,
    reduction: str = "mean",
    use_l2warp: bool = False,
    l2_penalty_factor: float = 1e-4,
    accumulate_grad_in_fp32: bool = True,
    process_group: Any = None,
) -> Tensor:
    """Cross entropy of ``F.linear(x, weight, bias)``, a float32 scalar.

    Args:
        x: ``[N, H]``.
        target: ``[N]``, class ids or ``ignore_index``.
        weight: ``[V, H]``; with ``process_group`` this rank's equal share of the classes.
        bias: ``[V]``.
        ignore_index, label_smoothing, logit_scale, logit_softcapping: as for
            :func:`fla.modules.fused_cross_entropy.cross_entropy_loss`.
        num_chunks: of tokens; more where the logits of a chunk would take over 256 MiB, and no more than bring
            them to the size of ``x``.
        reduction: ``"mean"`` over rows that are not ignored (0 when all are) or ``"sum"``.
        use_l2warp: add ``l2_penalty_factor / N * max(logits)`` to the gradient of the largest logit of every row; the
            value of the loss stays as it is.
        accumulate_grad_in_fp32: sum the chunks' weight gradients in float32.
        process_group: ranks that share the classes; ``x`` and ``target`` are the same on all of them.

    Raises:
        ArgumentError: shapes that do not fit, another reduction, or (on the CPU) a target that is not a class.
    """
    settings = Settings(
        ignore_index,
        label_smoothing,
        logit_scale,
        logit_softcapping,
        num_chunks,
        reduction,
        use_l2warp,
        l2_penalty_factor,
        accumulate_grad_in_fp32,
        process_group,
    )
    return differentiable(x, target, weight, bias, settings, TORCH)


fused_linear_cross_entropy_loss.op.pair = _Pair()  # type: ignore[attr-defined]
