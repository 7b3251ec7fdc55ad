# SPDX-License-Identifier: MIT
"""Which tensors the Triton kernels of the modules take. Needs no triton; the rest of a call runs in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fla.ops._common.single import transformed

Answer = bool | tuple[bool, str]

# Subclasses (DTensor and others) have their own idea of where their numbers are.
_PLAIN = frozenset({Tensor, nn.Parameter})
DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})

_SUBCLASS: Answer = (False, "the Triton kernels take plain tensors, not subclasses")
TRANSFORMED = False, "the Triton kernels compute no forward-mode derivatives and no torch.func transforms"
WRONG_DTYPE: Answer = (False, "the Triton kernels take float16, bfloat16 and float32; other dtypes run in PyTorch")


def covers_plain(*tensors: Tensor | None) -> Answer:
    """Plain tensors of dtypes up to 32 bits, outside transforms."""
    if transformed():
        return TRANSFORMED
    for t in tensors:
        if t is not None:
            if type(t) not in _PLAIN:
                return _SUBCLASS
            if t.dtype not in DTYPES:
                return WRONG_DTYPE
    return True


def covers_one(x: Tensor) -> Answer:
    """Verifier of functions of one tensor."""
    return covers_plain(x)


def covers_two(x: Tensor, y: Tensor) -> Answer:
    """Verifier of functions of two tensors."""
    return covers_plain(x, y)


def covers_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Answer:
    """Verifier of functions of two tensors followed by a linear layer."""
    return covers_plain(x, y, weight, bias)


def covers_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Answer:
    """Verifier of the rotary embedding."""
    return covers_plain(x, cos, sin)


def covers_shift(x: Tensor, cache: Tensor | None) -> Answer:
    """Verifier of the token shift."""
    return covers_plain(x, cache)


def covers_rotary_pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Answer:
    """Verifier of the rotary embedding of two tensors."""
    return covers_plain(q, k, cos, sin)
