# SPDX-License-Identifier: MIT
"""Have the kernels of a training step compiled side by side at its first call; see `ahead`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fla.ops._common.ahead import ahead, possible

_sent: set[Any] = set()


def _stand_in(x: Tensor | None) -> Tensor | None:
    return None if x is None else torch.empty_like(x, device="meta")


def first_call(key: Any, inputs: tuple[Tensor | None, ...], step: Callable[..., Any]) -> None:
    """Run ``step``, which launches what a forward and a backward pass launch, once for each ``key`` and kind of inputs,
    on meta tensors in place of ``inputs``.

    Kernels that are there already are found again in Triton's cache, so a key may be finer than it need be.
    """
    first = inputs[0]
    if first is None or not first.is_cuda:
        return
    full = (key, first.device, *(None if x is None else x.dtype for x in inputs))
    if full in _sent:
        return
    _sent.add(full)
    if possible() and not torch.cuda.is_current_stream_capturing():
        with ahead(first.device), torch.no_grad():
            step(*map(_stand_in, inputs))
