# SPDX-License-Identifier: MIT
"""Triton paths of the functions in `fla.ops.utils.core`, with their parameters; no autograd here."""

from __future__ import annotations

import torch
from torch import Tensor

from fla.ops._common.device_index import chunk_table
from fla.ops._common.launch import Launcher, on_device
from fla.ops._common.policy import pow2
from fla.ops.utils import kernels

_local, _global = Launcher(kernels.local_sums), Launcher(kernels.global_sums)
_softmax, _softmax_grad = Launcher(kernels.softmax_rows), Launcher(kernels.softmax_grad_rows)
_logsumexp, _means, _move = (
    Launcher(kernels.logsumexp_rows), Launcher(kernels.chunk_means), Launcher(kernels.move_rows),
)  # fmt: skip
_TILE = 4096  # elements a program


def _options(elements: int) -> dict[str, int]:
    return {"num_warps": max(1, min(16, elements // 512)), "num_stages": 1}


def local_sums(
    x: Tensor, chunk: int, reverse: bool, scale: float, cu_seqlens: Tensor | None, dtype: torch.dtype, uncovered: bool
) -> Tensor:
    x = x.contiguous()
    y = torch.zeros_like(x, dtype=dtype) if uncovered else torch.empty_like(x, dtype=dtype)
    if not x.numel():
        return y
    S = x.shape[2:].numel()
    bs = min(pow2(S, 1), max(1, _TILE // chunk))
    with on_device(x):
        t = chunk_table(x.shape[0], x.shape[1], chunk, cu_seqlens)
        meta = {"S": S, "BS": bs, "C": chunk, "REVERSE": reverse, "VARLEN": t.varlen}
        args = (x, y, x if t.rows is None else t.rows, x.shape[1], t.per_sequence, float(scale))
        _local(t.chunks * -(-S // bs), args, meta, _options(chunk * bs), (x, y))
    return y


def global_sums(x: Tensor, reverse: bool, scale: float, cu_seqlens: Tensor | None, dtype: torch.dtype) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x, dtype=dtype)
    if not x.numel():
        return y
    S = x.shape[2:].numel()
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    # Few columns leave few programs: those take more rows at a time.
    bs = min(pow2(S, 1), 8 if S * sequences <= 4096 else 32)
    bt = _TILE // bs
    with on_device(x):
        cu = None if cu_seqlens is None else cu_seqlens.contiguous()
        meta = {"S": S, "BS": bs, "BT": bt, "REVERSE": reverse, "VARLEN": cu is not None}
        args = (x, y, x if cu is None else cu, x.shape[1], float(scale))
        _global(sequences * -(-S // bs), args, meta, _options(bt * bs), (x, y, cu))
    return y


def softmax(x: Tensor, dtype: torch.dtype) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x, dtype=dtype)
    D = x.shape[-1]
    if x.numel():
        with on_device(x):
            _softmax(x.numel() // D, (x, y), {"D": D, "BD": pow2(D)}, _options(pow2(D)), (x, y))
    return y


def softmax_grad(p: Tensor, dp: Tensor, dtype: torch.dtype) -> Tensor:
    p, dp = p.contiguous(), dp.contiguous()
    y = torch.empty_like(p, dtype=dtype)
    D = p.shape[-1]
    if p.numel():
        with on_device(p):
            _softmax_grad(p.numel() // D, (p, dp, y), {"D": D, "BD": pow2(D)}, _options(pow2(D)), (p, dp, y))
    return y


def logsumexp(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    x = x.contiguous()
    y = x.new_empty(x.shape[:-1], dtype=dtype)
    D = x.shape[-1]
    if y.numel():
        with on_device(x):
            _logsumexp(y.numel(), (x, y, float(scale)), {"D": D, "BD": pow2(D)}, _options(pow2(D)), (x, y))
    return y


def _chunk_means(x: Tensor, y: Tensor | None, chunk: int, cu_seqlens: Tensor | None, chunks: int | None) -> Tensor:
    """Means of the chunks of ``x`` `[B, T, ...]`; with ``y`` their gradient, to ``x``."""
    B, T = x.shape[:2]
    S = x.shape[2:].numel()
    grad = y is not None
    with on_device(x):
        t = chunk_table(B, T, chunk, cu_seqlens)
        if y is None:
            lead = (B, t.per_sequence) if cu_seqlens is None else (1, t.chunks)
            y = x.new_empty(*lead, *x.shape[2:])
        if not x.numel():
            return x if grad else y.zero_()
        bs = min(pow2(S, 1), 256)
        bt = min(pow2(chunk, 1), _TILE // bs)
        meta = {"S": S, "BS": bs, "C": chunk, "BT": bt, "GRAD": grad, "VARLEN": t.varlen}
        args = (x, y, x if t.rows is None else t.rows, T, t.per_sequence)
        launches = (t.chunks if chunks is None else chunks) * -(-S // bs)
        _means(launches, args, meta, _options(bt * bs), (x, y))
    if not grad and t.offsets is not None:
        # The table has room for the most chunks there can be; how many there are only the device knows.
        y = y[:, : int(t.offsets[-1])].contiguous()
    return x if grad else y


def chunk_means(x: Tensor, chunk: int, cu_seqlens: Tensor | None) -> Tensor:
    return _chunk_means(x.contiguous(), None, chunk, cu_seqlens, None)


def chunk_means_grad(dy: Tensor, shape: tuple[int, ...], chunk: int, cu_seqlens: Tensor | None) -> Tensor:
    dx = dy.new_empty(shape)
    return _chunk_means(dx, dy.contiguous(), chunk, cu_seqlens, None if cu_seqlens is None else dy.shape[1])


def _moved(padded: Tensor, packed: Tensor, cu_seqlens: Tensor, left: bool, pad: bool) -> None:
    N, W = padded.shape[:2]
    S = padded.shape[2:].numel()
    bs = min(pow2(S, 1), 1024)
    bt = max(1, min(pow2(W, 1), _TILE // bs))
    with on_device(padded):
        meta = {"S": S, "BS": bs, "BT": bt, "LEFT": left, "PAD": pad}
        grid = N * -(-W // bt) * -(-S // bs)
        _move(grid, (padded, packed, cu_seqlens, W), meta, _options(bt * bs), (padded, packed, cu_seqlens))


def pack(x: Tensor, cu_seqlens: Tensor, left: bool, total: int) -> Tensor:
    y = x.new_empty(total, *x.shape[2:])
    if y.numel():
        _moved(x.contiguous(), y, cu_seqlens.contiguous(), left, False)
    return y


def unpack(x: Tensor, cu_seqlens: Tensor, left: bool, width: int) -> Tensor:
    y = x.new_empty(cu_seqlens.numel() - 1, width, *x.shape[1:])
    if y.numel():
        _moved(y, x.contiguous(), cu_seqlens.contiguous(), left, True)
    return y
