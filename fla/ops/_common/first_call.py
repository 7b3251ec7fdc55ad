# SPDX-License-Identifier: MIT
"""Have the kernels of a training step compiled side by side at its first call; see `ahead`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fla.ops._common.ahead import ahead, possible

_sent: set[Any] = set()
_SENT_AT_MOST = 4096


def _stand_in(x: Tensor | None) -> Tensor | None:
    return None if x is None else torch.empty(x.shape, dtype=x.dtype, device="meta")


def first_call(
    known: set[Any], key: Any, more: Callable[[], Any], inputs: tuple[Tensor | None, ...], step: Callable[..., Any]
) -> None:
    """Run ``step``, which launches what a forward and a backward pass launch, on meta tensors in place of ``inputs``,
    once for each ``key``, ``more()`` and types of inputs.

    ``known`` belongs to calls of one size, which differ by ``key``; ``more`` says what decides about kernels among
    calls of all sizes. Kernels that are there already are found again in Triton's cache, so keys may be too fine.
    """
    here = (key, *[None if x is None else x.dtype for x in inputs])
    if here in known:
        return
    known.add(here)
    first = inputs[0]
    if first is None or not first.is_cuda or not possible() or torch.cuda.is_current_stream_capturing():
        return
    full = (here, more(), first.device)
    if full in _sent:
        return
    if len(_sent) >= _SENT_AT_MOST:
        _sent.clear()
    _sent.add(full)
    with ahead(first.device), torch.no_grad():
        step(*map(_stand_in, inputs))
