# SPDX-License-Identifier: MIT
"""Precision rules shared by the modules."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype a module computes in for inputs of ``dtype``: float32 at least, float64 stays float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def upcast(x: Tensor) -> Tensor:
    """``x`` in its accumulation dtype; no copy when it has it already."""
    return x.to(accumulation_dtype(x.dtype))


def parameter_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of a norm's parameters.

    A scale near one cannot move by less than 2**-8 in bfloat16, so optimiser steps of 1e-4 would be lost. Unless the
    caller asks for a dtype, the parameters are float32 even when the default dtype is a 16-bit one.
    """
    return accumulation_dtype(torch.get_default_dtype()) if dtype is None else dtype


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a product with ``x``: autocast's while it is active on the device of ``x``, else that of ``x``."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype
