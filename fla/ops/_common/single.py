# SPDX-License-Identifier: MIT
"""Autograd functions at little cost: their call, and backward passes that are not differentiable themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

__all__ = ["applied", "once", "probes", "savable", "transformed", "unbatched"]

_transforming: Callable[[], bool] = torch._C._are_functorch_transforms_active


def transformed() -> bool:
    """Whether a ``torch.func`` transform or forward mode is on, of which kernels know nothing."""
    return forward_ad._current_level >= 0 or _transforming()


def savable(x: torch.Tensor | None) -> torch.Tensor | None:
    """``x``, or a copy where autograd would refuse to keep it: offsets may come from ``torch.inference_mode``."""
    return x.clone() if x is not None and x.is_inference() else x


def _batched(x: Any) -> bool:
    functorch = torch._C._functorch
    return isinstance(x, torch.Tensor) and (functorch.is_batchedtensor(x) or functorch.is_legacy_batchedtensor(x))


def _say_batched(grads: tuple[Any, ...], error: RuntimeError) -> None:
    if any(map(_batched, grads)):
        raise RuntimeError(
            "This backward takes one gradient at a time, not a batch of them: leave out is_grads_batched or vectorize, "
            "and torch.vmap around torch.autograd.grad."
        ) from error


def unbatched(backward: Callable[..., Any]) -> Callable[..., Any]:
    """``backward``, with an error that says so where it fails over a batch of gradients."""

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        try:
            return backward(ctx, *grads)
        except RuntimeError as error:
            _say_batched(grads, error)
            raise

    return run


class _Refused(torch.autograd.Function):
    """The first of ``tensors`` as they are; their gradient raises. The others only say on what they depend."""

    @staticmethod
    def forward(ctx: Any, name: str, results: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.name = name
        return tensors[:results]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"trying to differentiate twice: the backward of {ctx.name} computes first derivatives only. Plain "
            'PyTorch has second ones: fla.backends.use_backend("torch"), and fused_recurrent for ops.'
        )


class _Unpacked:
    """A context whose saved tensors are unpacked already: checkpointing lets that happen once."""

    def __init__(self, ctx: Any, saved: tuple[Any, ...]) -> None:
        self.__dict__.update(_ctx=ctx, saved_tensors=saved)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)


def probes(*inputs: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Empty tensors that depend on ``inputs``, for ``ctx.probes`` of a function that saves none of them itself."""
    if torch.compiler.is_compiling():
        return ()
    with torch.enable_grad():
        return tuple(x.reshape(-1)[:0].clone() for x in inputs if x is not None and x.requires_grad)


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """As torch's ``once_differentiable``, at no cost where no second derivative can be asked for.

    torch's raises in ``backward`` of a loss only, and where the incoming gradients require one: those of a sum do not,
    and ``torch.autograd.grad`` leaves out what does not lead to its inputs. A penalty on gradients then loses its own
    without a word. Here results depend on all that the function saves, so the inputs must be among it, or outputs, or
    ``ctx.probes``.
    """

    def careful(ctx: Any, grads: tuple[Any, ...]) -> Any:
        saved = ctx.saved_tensors
        behind = [*saved, *grads, *getattr(ctx, "probes", ())]
        with torch.no_grad():
            found = backward(_Unpacked(ctx, saved), *grads)
        results = found if isinstance(found, tuple) else (found,)
        tensors = [x for x in results if isinstance(x, torch.Tensor)]
        # The last one stands for what is not seen, so that at least a loss's backward raises.
        needs = [x for x in behind if isinstance(x, torch.Tensor) and x.requires_grad]
        needs.append(torch.empty(0).requires_grad_())
        kept = iter(_Refused.apply(type(ctx).__name__, len(tensors), *tensors, *needs))
        return tuple(next(kept) if isinstance(x, torch.Tensor) else x for x in results)

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        try:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                return careful(ctx, grads)
            return backward(ctx, *grads)
        except RuntimeError as error:
            _say_batched(grads, error)
            raise

    return run


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` for positional arguments, without torch's layers in Python, which take half of its time.

    What they are for, functorch's transforms, goes through them: there a function without ``setup_context`` says so.
    """
    careful = function.apply
    direct = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def apply(*args: Any) -> Any:
        return careful(*args) if _transforming() else direct(*args)

    return apply
