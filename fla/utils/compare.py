# SPDX-License-Identifier: MIT
"""Comparison of results with a reference. Float64 inside; nothing in the environment loosens it."""

from __future__ import annotations

import logging
import warnings

import torch

logger = logging.getLogger(__name__)


def _wide(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return x.detach().to(device=like.device, dtype=torch.float64)


def get_abs_err(x: torch.Tensor, y: torch.Tensor) -> float:
    """Largest absolute difference; 0 for empty tensors."""
    difference = _wide(x, x) - _wide(y, x)
    return difference.abs().max().item() if difference.numel() else 0.0


def get_err_ratio(x: torch.Tensor, y: torch.Tensor) -> float:
    """RMS(x - y) / (RMS(x) + 1e-8), `x` being the reference; 0 for empty tensors."""
    if x.numel() == 0:
        return 0.0
    a, b = _wide(x, x), _wide(y, x)
    return ((a - b).square().mean().sqrt() / (a.square().mean().sqrt() + 1e-8)).item()


def _first(mask: torch.Tensor) -> tuple[int, ...]:
    return tuple(torch.nonzero(mask)[0].tolist())


def assert_close(
    prefix: str,
    ref: torch.Tensor,
    tri: torch.Tensor,
    ratio: float,
    warning: bool = False,
    err_atol: float = 1e-6,
) -> None:
    """Raise unless `tri` is near the reference.

    Near: the largest absolute difference is at most `err_atol`, or RMS(ref - tri) / (RMS(ref) + 1e-8) is below `ratio`.
    Both figures go to the log. dtypes may differ, shapes may not.

    Args:
        prefix: what is compared, for the messages.
        warning: a difference beyond `ratio` warns instead of raising. Unequal shapes, NaN and infinity still raise.

    Raises:
        AssertionError: unequal shapes, NaN or infinity on either side, or a difference. The message names the first
            place that is off and both values there.
    """
    if ref.shape != tri.shape:
        raise AssertionError(f"{prefix}: shape {list(tri.shape)}, the reference has {list(ref.shape)}")
    if ref.numel() == 0:
        return
    a, b = _wide(ref, ref), _wide(tri, ref)
    for side, x in (("the reference", a), ("the result", b)):
        if not torch.isfinite(x).all():
            at = _first(~torch.isfinite(x))
            raise AssertionError(f"{prefix}: {side} is {x[at].item()} at {list(at)}")
    error, relative = get_abs_err(a, b), get_err_ratio(a, b)
    message = f"{prefix}: max abs difference {error:.3e}, RMS ratio {relative:.3e}"
    logger.info(message)
    if error <= err_atol or relative < ratio:
        return
    # One element at least is off by `ratio` times the RMS of the reference, else the ratio would be below it.
    off = (a - b).abs()
    over = off >= ratio * a.square().mean().sqrt()
    at = _first(over if over.any() else off == off.max())
    message += (
        f" (allowed below {ratio:.3e}); first off at {list(at)}: {b[at].item():.6g}, "
        f"the reference has {a[at].item():.6g}"
    )
    if not warning:
        raise AssertionError(message)
    warnings.warn(message, stacklevel=2)
