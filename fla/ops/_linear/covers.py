# SPDX-License-Identifier: MIT
"""Which calls the scalar-decay Triton kernels cover. Needs no triton; the rest of a call runs in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from fla.backends import needs_backward
from fla.ops._common.covers import Answer, covers_chunk
from fla.ops._linear.policy import DECODE_TOKENS


def covers_scalar(q: Tensor, v: Tensor) -> Answer:
    """Verifier of the chunked ops."""
    if q.dtype == torch.float32 and q.shape[-1] > 128:
        return False, f"in float32 the Triton kernels take K up to 128, got {q.shape[-1]}"
    return covers_chunk(q, v)


def covers_recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, initial_state: Tensor | None, reverse: bool
) -> Answer:
    """Verifier of the recurrent ops."""
    if reverse and (q.shape[1] > DECODE_TOKENS or needs_backward((q, k, v, g, initial_state))):
        return False, f"the Triton kernels run in reverse without gradients and up to {DECODE_TOKENS} tokens only"
    return covers_scalar(q, v)


def covers_linear_attn(q: Tensor, v: Tensor, normalize: bool) -> Answer:
    """Verifier of the linear_attn ops, without their ``reverse``."""
    if normalize:
        return False, "the Triton kernels leave the normaliser to PyTorch"
    return covers_scalar(q, v)
