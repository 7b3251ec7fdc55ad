# SPDX-License-Identifier: MIT
"""Which calls the Triton kernels with decays per channel cover. Needs no triton; the rest of a call runs in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from fla.backends import needs_backward
from fla.ops._common.covers import Answer
from fla.ops._common.policy import chip_of
from fla.ops._linear.policy import DECODE_TOKENS

MAX_HEAD_DIM = 512


def covers_vector(q: Tensor, v: Tensor) -> Answer:
    """Verifier of ``chunk_gla`` and what every call must meet."""
    if q.dtype == torch.float64:
        return False, "the Triton kernels compute in float32, float64 runs in PyTorch"
    K, V = q.shape[-1], v.shape[-1]
    if max(K, V) > MAX_HEAD_DIM:
        return False, f"the Triton kernels take K and V up to {MAX_HEAD_DIM}, got {K} and {V}"
    if 0 in q.shape or 0 in v.shape:
        return False, "there is nothing to launch for axes of no length"
    chip = chip_of(q.device)
    if chip.vendor == "nvidia" and chip.arch < 80:
        return False, f"the Triton kernels need compute capability 8.0, this GPU has {chip.arch / 10}"
    return True, None


def goes_token_by_token(tokens: int, *tensors: Tensor | None) -> bool:
    """Whether a call of a recurrent form is one launch token by token: few tokens and no gradients."""
    return tokens <= DECODE_TOKENS and not needs_backward(tensors)


def covers_recurrent_gla(
    q: Tensor, k: Tensor, v: Tensor, gk: Tensor | None, gv: Tensor | None, initial_state: Tensor | None, reverse: bool
) -> Answer:
    """Verifier of ``fused_recurrent_gla``."""
    if not goes_token_by_token(q.shape[1], q, k, v, gk, gv, initial_state):
        few = f"over more than {DECODE_TOKENS} tokens or with gradients"
        if gk is not None and gv is not None:
            return False, f"the Triton kernels take `gk` and `gv` together, but not {few}"
        if gk is None and gv is None and reverse:
            return False, f"the Triton kernels run in reverse without a gate, but not {few}"
    return covers_vector(q, v)


def covers_rwkv6(r: Tensor, v: Tensor) -> Answer:
    """Verifier of the rwkv6 ops."""
    return covers_vector(r, v)


def covers_gsa(q: Tensor, v: Tensor, s: Tensor) -> Answer:
    """Verifier of the gsa ops."""
    for x in (v, s):
        good, reason = covers_vector(q, x)
        if not good:
            return good, reason
    return True, None
