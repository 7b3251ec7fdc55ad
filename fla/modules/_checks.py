# SPDX-License-Identifier: MIT
"""Checks shared by the modules."""

from __future__ import annotations

from torch import Tensor

from fla.ops._common.checks import ArgumentError


def check_beside(x: Tensor, **others: Tensor | None) -> None:
    """Check that ``others`` are on the device of ``x``, the first argument: a kernel would read wild addresses."""
    device = x.device
    for name, t in others.items():
        if t is not None and t.device != device:
            raise ArgumentError(f"`{name}` must be on the device of the first argument, {device}, got {t.device}.")
