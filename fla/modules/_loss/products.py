# SPDX-License-Identifier: MIT
"""Products of the losses that contain a linear layer, and the chunks of tokens they are taken in."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

__all__ = ["add_weight_grad", "linear_", "logits_buffer", "token_chunks"]

LOGITS = 256 << 20
"""Bytes of logits alive at a time. Half of it costs the products of a large layer 5 to 10 % of their speed."""


def token_chunks(N: int, H: int, V: int, num_chunks: int, itemsize: int, room: int = 0) -> list[slice]:
    """Rows of each chunk: in ``num_chunks`` chunks, in more where the logits of one would take over `LOGITS` bytes.

    Not in more than bring a chunk's logits to the size of the inputs, and at least 128 rows in each. ``room``: bytes
    that logits may take in any case.
    """
    if N == 0:
        return []
    size = 1 << math.ceil(math.log2(math.ceil(N / max(1, min(num_chunks, math.ceil(V / H))))))
    while size > 128 and size * V * itemsize > max(LOGITS, room):
        size //= 2
    return [slice(start, min(start + size, N)) for start in range(0, N, size)]


def logits_buffer(rows: int, V: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``[rows, V]`` whose rows begin on 16 bytes, which kernels and products want."""
    step = max(1, 16 // dtype.itemsize)
    return torch.empty(rows, -(-V // step) * step, dtype=dtype, device=device)[:, :V]


def linear_(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` into ``out``."""
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


@functools.lru_cache(maxsize=1)
def _widens() -> bool:
    """Whether this torch multiplies 16-bit matrices into a float32 one (2.8 and later, on CUDA)."""
    return any("out_dtype" in str(schema) for schema in torch._C._jit_get_schemas_for_operator("aten::addmm"))


def add_weight_grad(dw: Tensor, grad: Tensor, h: Tensor, first: bool) -> None:
    """Add ``grad.T @ h`` to ``dw``, which may be of a wider dtype; ``first`` overwrites it."""
    if dw.dtype == grad.dtype:
        if first:
            torch.mm(grad.t(), h, out=dw)
        else:
            dw.addmm_(grad.t(), h)
    elif grad.is_cuda and torch.version.hip is None and dw.dtype == torch.float32 and _widens():
        if first:
            torch.mm(grad.t(), h, out_dtype=dw.dtype, out=dw)
        else:
            torch.addmm(dw, grad.t(), h, out_dtype=dw.dtype, out=dw)
    elif first:
        dw.copy_(grad.t() @ h)
    else:
        dw += grad.t() @ h
