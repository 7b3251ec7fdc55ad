# SPDX-License-Identifier: MIT
"""Running sums over whole sequences or restarted at every chunk, accumulated in float32 (float64 for float64).

Differentiable: the gradient of running sums are running sums from the other end.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from fla.backends import needs_backward
from fla.ops._common import checks
from fla.ops._common.single import unbatched
from fla.ops.utils.core import global_sums, local_sums

__all__ = [
    "chunk_global_cumsum",
    "chunk_global_cumsum_scalar",
    "chunk_global_cumsum_vector",
    "chunk_local_cumsum",
    "chunk_local_cumsum_scalar",
    "chunk_local_cumsum_vector",
]

_F = TypeVar("_F", bound=Callable[..., Tensor])


_FORMS = {3: "B T H", 4: "B T H D"}


def _check(name: str, x: Tensor, cu_seqlens: Tensor | None, head_first: object, *, allow_uncovered: bool) -> None:
    if head_first is not None:
        raise DeprecationWarning("`head_first` was removed: pass tensors as [B, T, H] or [B, T, H, D].")
    checks.check_tensor(name, x)
    sizes = checks.check_shapes(**{name: (x, " | ".join(_FORMS.values()))})
    device = None if cu_seqlens is None else x.device
    checks.check_varlen(cu_seqlens, None, sizes["B"], sizes["T"], device=device, allow_uncovered=allow_uncovered)


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[..., Tensor], reverse: bool, dtype: torch.dtype) -> Tensor:
        ctx.run, ctx.reverse, ctx.dtype = run, reverse, x.dtype
        return run(x, reverse, dtype)

    @staticmethod
    @unbatched
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _sums(grad, ctx.run, not ctx.reverse, ctx.dtype), None, None, None


def _sums(x: Tensor, run: Callable[..., Tensor], reverse: bool, dtype: torch.dtype) -> Tensor:
    return _Sums.apply(x, run, reverse, dtype) if needs_backward((x,)) else run(x, reverse, dtype)


def _local(
    g: Tensor,
    chunk_size: int,
    reverse: bool,
    scale: float | None,
    cu_seqlens: Tensor | None,
    output_dtype: torch.dtype | None,
    head_first: object,
    use_graph: bool,
) -> Tensor:
    _check("g", g, cu_seqlens, head_first, allow_uncovered=use_graph)
    checks.check_power_of_two("chunk_size", chunk_size)
    factor = 1.0 if scale is None else scale
    uncovered = use_graph and cu_seqlens is not None

    def run(x: Tensor, reverse: bool, dtype: torch.dtype) -> Tensor:
        return local_sums(x, chunk_size, reverse, factor, cu_seqlens, dtype, uncovered)

    return _sums(g, run, reverse, output_dtype or g.dtype)


def _global(
    s: Tensor,
    reverse: bool,
    cu_seqlens: Tensor | None,
    scale: float | None,
    output_dtype: torch.dtype | None,
    head_first: object,
) -> Tensor:
    _check("s", s, cu_seqlens, head_first, allow_uncovered=False)
    factor = 1.0 if scale is None else scale

    def run(x: Tensor, reverse: bool, dtype: torch.dtype) -> Tensor:
        return global_sums(x, reverse, factor, cu_seqlens, dtype)

    return _sums(s, run, reverse, output_dtype or s.dtype)


def _of_rank(sums: _F, rank: int) -> _F:
    """The function for tensors of one rank, as ``..._scalar`` (3) or ``..._vector`` (4)."""
    first = next(iter(inspect.signature(sums).parameters))

    @functools.wraps(sums)
    def fixed(*args: Any, **kwargs: Any) -> Tensor:
        x = args[0] if args else kwargs.get(first)
        if isinstance(x, Tensor):
            checks.check_shapes(**{first: (x, _FORMS[rank])})
        return sums(*args, **kwargs)

    fixed.__name__ = fixed.__qualname__ = f"{sums.__name__}_{'scalar' if rank == 3 else 'vector'}"
    return cast(_F, fixed)


def chunk_local_cumsum(
    g: Tensor,
    chunk_size: int,
    reverse: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
    chunk_indices: Tensor | None = None,
    use_graph: bool = False,
    *,
    head_first: object = None,
) -> Tensor:
    """Running sums that restart at every chunk and sequence.

    Args:
        g: ``[B, T, H]`` or ``[B, T, H, D]``.
        chunk_size: tokens per chunk, a power of two.
        reverse: sums from each token to the end of its chunk.
        scale: factor of the result.
        cu_seqlens: boundaries of packed sequences ``[N + 1]``; B must be 1.
        output_dtype: dtype of the result; None for that of g.
        chunk_indices: what a launch on a GPU may be given; without effect on the result.
        use_graph: `cu_seqlens` may end before T.
        head_first: removed; raises DeprecationWarning.

    Returns:
        The sums, in the shape of g; zero at tokens that no sequence covers.

    Raises:
        ValueError (and AssertionError): another rank, offsets that do not fit, a chunk size that is no power of two.
    """
    return _local(g, chunk_size, reverse, scale, cu_seqlens, output_dtype, head_first, use_graph)


chunk_local_cumsum_scalar = _of_rank(chunk_local_cumsum, 3)
chunk_local_cumsum_vector = _of_rank(chunk_local_cumsum, 4)


def chunk_global_cumsum(
    s: Tensor,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    output_dtype: torch.dtype | None = torch.float,
    *,
    head_first: object = None,
) -> Tensor:
    """Running sums over whole sequences.

    Args:
        s: ``[B, T, H]`` or ``[B, T, H, D]``.
        reverse: sums from each token to the end of its sequence.
        cu_seqlens: boundaries of packed sequences ``[N + 1]``; B must be 1.
        scale: factor of the result.
        output_dtype: dtype of the result; None for that of s.
        head_first: removed; raises DeprecationWarning.

    Returns:
        The sums, in the shape of s.

    Raises:
        ValueError (and AssertionError): another rank, or offsets that do not fit.
    """
    return _global(s, reverse, cu_seqlens, scale, output_dtype, head_first)


chunk_global_cumsum_scalar = _of_rank(chunk_global_cumsum, 3)
chunk_global_cumsum_vector = _of_rank(chunk_global_cumsum, 4)
