# SPDX-License-Identifier: MIT
"""Between padded batches and packed sequences. Differentiable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fla.backends import needs_backward
from fla.ops._common import checks
from fla.ops._common.checks import ArgumentError
from fla.ops._common.single import savable, unbatched
from fla.ops.utils.core import pack, unpack
from fla.ops.utils.index import prepare_lens

__all__ = ["pack_sequence", "unpack_sequence"]


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cu_seqlens: Tensor, left: bool, total: int) -> Tensor:
        ctx.save_for_backward(savable(cu_seqlens))
        ctx.left, ctx.width = left, x.shape[1]
        return pack(x, cu_seqlens, left, total)

    @staticmethod
    @unbatched
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return _Unpack.apply(dy, *ctx.saved_tensors, ctx.left, ctx.width), None, None, None


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cu_seqlens: Tensor, left: bool, width: int) -> Tensor:
        ctx.save_for_backward(savable(cu_seqlens))
        ctx.left, ctx.total = left, x.shape[0]
        return unpack(x, cu_seqlens, left, width)

    @staticmethod
    @unbatched
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return _Pack.apply(dy, *ctx.saved_tensors, ctx.left, ctx.total), None, None, None


def _check(x: Tensor, ndim: int, padding_side: str, cu_seqlens: Tensor) -> None:
    checks.check_tensor("x", x)
    checks.check_tensor("cu_seqlens", cu_seqlens)
    checks.check_choice("padding_side", padding_side, ("left", "right"))
    if x.dim() < ndim:
        raise ArgumentError(f"`x` must have at least {ndim} axes, got shape {list(x.shape)}.")


def _check_lens(cu_seqlens: Tensor, width: int) -> None:
    if cu_seqlens.device.type == "cpu" and len(cu_seqlens) > 1 and int(prepare_lens(cu_seqlens).max()) > width:
        raise ArgumentError(f"A sequence of `cu_seqlens` is longer than the {width} rows of the padded batch.")


def pack_sequence(x: Tensor, cu_seqlens: Tensor, padding_side: str = "left") -> Tensor:
    """Drop the padding of a batch.

    Args:
        x: ``[N, S, ...]``.
        cu_seqlens: boundaries of the packed sequences ``[N + 1]``.
        padding_side: ``left`` or ``right``, where the padding of x is.

    Returns:
        ``[total, ...]``.

    Raises:
        ValueError (and AssertionError): another side, fewer than two axes, offsets of another number of sequences or of
            longer ones.
    """
    _check(x, 2, padding_side, cu_seqlens)
    if len(cu_seqlens) != x.shape[0] + 1:
        raise ArgumentError(
            f"`cu_seqlens` must have {x.shape[0] + 1} entries for {x.shape[0]} rows, got {len(cu_seqlens)}."
        )
    _check_lens(cu_seqlens, x.shape[1])
    total, left = int(cu_seqlens[-1]), padding_side == "left"
    return (_Pack.apply if needs_backward((x,)) else pack)(x, cu_seqlens, left, total)


def unpack_sequence(
    x: Tensor, cu_seqlens: Tensor, padding_side: str = "left", desired_shape: torch.Size | tuple[int, ...] | None = None
) -> Tensor:
    """Pad packed sequences with zeros to a batch.

    Args:
        x: ``[total, ...]``.
        cu_seqlens: boundaries of the sequences ``[N + 1]``.
        padding_side: ``left`` or ``right``, where to pad.
        desired_shape: shape ``[N, S, ...]`` of the result; None for the longest sequence as S.

    Returns:
        ``[N, S, ...]``.

    Raises:
        ValueError (and AssertionError): another side, a shape that does not fit.
    """
    _check(x, 1, padding_side, cu_seqlens)
    N = len(cu_seqlens) - 1
    if desired_shape is None:
        width = int(prepare_lens(cu_seqlens).max()) if N else 0
    else:
        if len(desired_shape) < 2 or desired_shape[0] != N or tuple(desired_shape[2:]) != tuple(x.shape[1:]):
            wanted = ", ".join(map(str, (N, "S", *x.shape[1:])))
            raise ArgumentError(f"`desired_shape` must be [{wanted}], got {list(desired_shape)}.")
        width = desired_shape[1]
        _check_lens(cu_seqlens, width)
    left = padding_side == "left"
    return (_Unpack.apply if needs_backward((x,)) else unpack)(x, cu_seqlens, left, width)
