# SPDX-License-Identifier: MIT
"""Causal softmax attention through what torch has: SDPA, and its variable-length kernel or flash-attn on a GPU.

The last query of a sequence stands at its last key, so there may be more keys than queries.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fla.ops._common.checks import check_varlen

__all__ = ["dense_attention", "packed_attention"]

BLOCK = 512
"""Queries that share one mask of scores, where SDPA needs a mask."""


def _sdpa(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
    """SDPA of ``[B, T, H, K]`` with fewer heads of keys and values where wanted."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **kwargs).transpose(1, 2)


def _visible(T: int, S: int, window: int | None, like: Tensor) -> Tensor:
    """Which of `S` keys the last `T` positions see, ``[T, S]``."""
    distance = torch.arange(S - T, S, device=like.device)[:, None] - torch.arange(S, device=like.device)
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def _one_query(q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> Tensor:
    # The query heads that share keys are the rows of one attention, so that keys are not repeated.
    rows = q.unflatten(2, (k.shape[2], -1)).squeeze(1)
    mask = None if valid is None else valid[:, None, None]
    o = F.scaled_dot_product_attention(rows, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
    return o.flatten(1, 2)[:, None]


def dense_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None = None, valid: Tensor | None = None) -> Tensor:
    """Attention of the rows of a batch.

    Args:
        q: ``[B, T, H, K]``.
        k, v: ``[B, S, HK, K]`` and ``[B, S, HK, V]``, ``S >= T``.
        window: keys that a query sees, its own included; None for all.
        valid: ``[B, S]`` bool, the keys that count. For a single query a row only.

    Returns:
        ``[B, T, H, V]``.
    """
    T, S = q.shape[1], k.shape[1]
    if T == 1:
        if window is not None:
            k, v = k[:, -window:], v[:, -window:]
            valid = None if valid is None else valid[:, -window:]
        return _one_query(q, k, v, valid)
    if T == S and (window is None or window >= S):
        return _sdpa(q, k, v, is_causal=True)
    if window is not None and torch.compiler.is_compiling():
        return _sdpa(q, k, v, attn_mask=_visible(T, S, window, q))
    if window is not None and _flash(q) is not None:
        cu_q, cu_k = (torch.arange(q.shape[0] + 1, device=q.device, dtype=torch.int32) * n for n in (T, S))
        packed = (x.flatten(0, 1) for x in (q, k, v))
        return _flash(q)(*packed, cu_q, cu_k, T, S, window).unflatten(0, q.shape[:2])  # type: ignore[misc]
    parts = []
    for start in range(0, T, BLOCK):
        stop = min(start + BLOCK, T)
        last = S - T + stop
        first = 0 if window is None else max(0, S - T + start - window + 1)
        mask = _visible(stop - start, last - first, window, q)
        parts.append(_sdpa(q[:, start:stop], k[:, first:last], v[:, first:last], attn_mask=mask))
    return torch.cat(parts, 1)


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor | None = None,
    window: int | None = None,
    host_q: Tensor | None = None,
    host_k: Tensor | None = None,
) -> Tensor:
    """Attention of sequences packed into one row.

    Args:
        q: ``[1, T, H, K]``.
        k, v: ``[1, S, HK, K]`` and ``[1, S, HK, V]``.
        cu_q, cu_k: boundaries ``[N + 1]`` of the queries and the keys; ``cu_k`` is ``cu_q`` when None.
        window: as for :func:`dense_attention`.
        host_q, host_k: copies of the boundaries on the host, or None where they are there or must not be read.

    Returns:
        ``[1, T, H, V]``.
    """
    T, S = q.shape[1], k.shape[1]
    check_varlen(cu_q, host_q, q.shape[0], T)
    if cu_k is None:
        cu_k, host_k = cu_q, host_q
    flash = _flash(q)
    if torch.compiler.is_compiling() or cu_q.is_meta:
        if flash is not None:  # bounds of the lengths are enough
            return flash(*(x[0] for x in (q, k, v)), cu_q, cu_k, T, S, window)[None]
        segment = torch.searchsorted(cu_q[1:].contiguous(), torch.arange(T, device=q.device), right=True)
        return _sdpa(q, k, v, attn_mask=_visible(T, T, window, q) & (segment[:, None] == segment))
    stops_q, stops_k = (cu.cpu() if host is None else host for cu, host in ((cu_q, host_q), (cu_k, host_k)))
    if flash is not None:
        longest = (int(stops.diff().max()) for stops in (stops_q, stops_k))
        return flash(*(x[0] for x in (q, k, v)), cu_q, cu_k, *longest, window)[None]
    parts, a, c = [], 0, 0
    for b, d in zip(stops_q.tolist()[1:], stops_k.tolist()[1:], strict=True):
        if b > a:
            parts.append(dense_attention(q[:, a:b], k[:, c:d], v[:, c:d], window))
        a, c = b, d
    return torch.cat(parts, 1) if parts else q.new_zeros(*q.shape[:3], v.shape[-1])


def _fits(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def _flash(q: Tensor) -> Kernel | None:
    """A variable-length kernel for these queries, or None: 16 bits, heads of 8 to 256 channels, an NVIDIA GPU."""
    return KERNELS.get(_kernel_name(q.device.index)) if _fits(q) else None


_NAMES: dict[int | None, str] = {}


@torch.compiler.assume_constant_result
def _kernel_name(device: int | None) -> str:
    """flash-attn where it is installed, else the kernel of torch where it knows windows; from Ampere on."""
    if device not in _NAMES:
        modern = torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 0)
        _NAMES[device] = _find_kernel() if modern else ""
    return _NAMES[device]


def _find_kernel() -> str:
    try:
        import flash_attn  # noqa: F401
    except ImportError:
        return "torch" if "window_size" in _varlen_parameters() else ""
    return "flash_attn"


def _varlen_parameters() -> frozenset[str]:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before 2.10
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def _run_flash_attn(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, T: int, S: int, window: int | None
) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    sides = (-1, -1) if window is None else (window - 1, 0)
    return flash_attn_varlen_func(q, k, v, cu_q.int(), cu_k.int(), T, S, causal=True, window_size=sides)


def _run_torch(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, T: int, S: int, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if q.shape[1] != k.shape[1]:  # not every version shares keys
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    sides = (-1 if window is None else window - 1, 0)
    return varlen_attn(q, k, v, cu_q.int(), cu_k.int(), T, S, window_size=sides)  # type: ignore[return-value]


Kernel = Callable[..., Tensor]
KERNELS: dict[str, Kernel] = {"flash_attn": _run_flash_attn, "torch": _run_torch}
