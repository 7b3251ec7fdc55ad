# SPDX-License-Identifier: MIT
"""How the convolution kernels are launched, on the current device. Arguments have been checked; shapes as in
:mod:`.conv`."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fla.modules.causal_conv1d import kernels
from fla.ops._common.device_index import ChunkTable, chunk_table
from fla.ops._common.launch import Fixed, Launcher, on_device
from fla.ops._common.policy import Chip, chip_of, pow2

_fwd, _bwd = Launcher(kernels.conv_fwd), Launcher(kernels.conv_bwd)
_weight, _final = Launcher(kernels.conv_weight_grad), Launcher(kernels.conv_final)
_state, _update = Launcher(kernels.conv_state_grad), Launcher(kernels.conv_update)
_updates = Launcher(kernels.conv_updates)


@dataclass(frozen=True)
class ConvPlan:
    """``rows`` of a chunk (a multiple of four), ``block`` channels of a program, its warps; rows loaded ``ahead``."""

    rows: int
    block: int
    warps: int
    ahead: bool = False


def conv_plan(chip: Chip, rows: int, D: int, backward: bool = False) -> ConvPlan:
    """Plan for ``rows`` tokens in all. A thread owns four channels.

    Short chunks read their edges twice as often, long ones leave multiprocessors idle. The backward reads three more
    rows at each end and keeps twice the registers, so its chunks are longer and its programs fewer.
    """
    block = min(pow2(D, 32), 512)
    strips = -(-D // block)
    each, most = (3, 256) if backward else (6, 128)
    chunk = 16
    while chunk < most and rows * strips >= 2 * chunk * each * chip.sms:
        chunk *= 2
    return ConvPlan(chunk, block, max(1, block // 128))


def rows_of(x: Tensor) -> Tensor:
    """``[B, T, ...]`` as ``[B, T, D]`` whose channels lie side by side; a view where there is one."""
    x = x if x.dim() == 3 else x.flatten(2)
    return x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


class Call:
    """What the launches of one call share."""

    __slots__ = ("B", "D", "T", "W", "plan", "strips", "table")

    def __init__(self, B: int, T: int, D: int, W: int, plan: ConvPlan, table: ChunkTable) -> None:
        self.B, self.T, self.D, self.W, self.plan, self.table = B, T, D, W, plan, table
        self.strips = -(-D // plan.block)

    @staticmethod
    def make(
        x: Tensor, W: int, cu_seqlens: Tensor | None, plan: ConvPlan | None = None, backward: bool = False
    ) -> Call:
        B, T, D = x.shape
        if cu_seqlens is None and plan is None:
            return _dense(B, T, D, W, x.device, backward)
        plan = plan or conv_plan(chip_of(x.device), B * T, D, backward)
        return Call(B, T, D, W, plan, chunk_table(B, T, plan.rows, cu_seqlens))

    def empty(self, x: Tensor) -> Tensor:
        if self.table.varlen:
            # Rows that belong to no sequence must not show what was in the memory.
            return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@functools.lru_cache(maxsize=256)
def _dense(B: int, T: int, D: int, W: int, device: torch.device, backward: bool) -> Call:
    plan = conv_plan(chip_of(device), B * T, D, backward)
    return Call(B, T, D, W, plan, chunk_table(B, T, plan.rows))


@functools.lru_cache(maxsize=1024)
def _fwd_launch(
    W: int, v: int, p: ConvPlan, silu: bool, bias: bool, res: bool, state: bool, varlen: bool
) -> Fixed:  # fmt: skip
    meta = {
        "W": W, "VEC": v, "BD": p.block, "SILU": silu, "HAS_BIAS": bias, "HAS_RES": res, "HAS_STATE": state,
        "VARLEN": varlen, "AHEAD": p.ahead,
    }  # fmt: skip
    return _fwd.fix(meta, {"num_warps": p.warps})


@functools.lru_cache(maxsize=1024)
def _bwd_launch(
    W: int, v: int, p: ConvPlan, silu: bool, bias: bool, state: bool, dfinal: bool, need_x: bool, need_w: bool,
    varlen: bool,
) -> Fixed:  # fmt: skip
    meta = {
        "W": W, "VEC": v, "BD": p.block, "SILU": silu, "HAS_BIAS": bias, "HAS_STATE": state, "HAS_DFINAL": dfinal,
        "NEED_X": need_x, "NEED_W": need_w, "VARLEN": varlen, "AHEAD": p.ahead,
    }  # fmt: skip
    return _bwd.fix(meta, {"num_warps": p.warps})


@functools.lru_cache(maxsize=256)
def _weight_launch(W: int, D: int, bias: bool) -> tuple[Fixed, int]:
    block = min(128, pow2(D))
    fixed = _weight.fix({"W": W, "BM": 16, "BD": block, "HAS_BIAS": bias}, {"num_warps": 4})
    return fixed, (W + bias) * -(-D // block)


def conv_fwd(
    call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, state: Tensor | None,
    silu: bool,
) -> Tensor:  # fmt: skip
    """``y`` ``[B, T, D]``."""
    y, t, p = call.empty(x), call.table, call.plan
    res = x if residual is None else residual
    (xb, xt, _), (rb, rt, _) = x.stride(), res.stride()
    v = math.gcd(8, call.D, xb, xt, rb, rt)
    varlen = t.cu is not None
    run = _fwd_launch(
        call.W, v, p, silu, bias is not None, residual is not None, state is not None, varlen
    )  # fmt: skip
    run(
        t.chunks * call.strips,
        (x, weight, x if bias is None else bias, res, x if state is None else state, y,
         x if t.rows is None else t.rows, x if t.cu is None else t.cu, call.T, t.per_sequence, p.rows,
         call.D // v, xb // v, xt // v, rb // v, rt // v),
        (x, weight, bias, residual, state, t.cu),
    )  # fmt: skip
    return y


def conv_bwd(
    call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, dy: Tensor,
    dfinal: Tensor | None, silu: bool, need_x: bool, need_w: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """``dx``, ``dweight`` and ``dbias``; ``weight`` ``[D, W]`` or ``[D, 1, W]``."""
    t, p, D, W = call.table, call.plan, call.D, call.W
    dx = call.empty(x) if need_x else None
    part = torch.empty(t.chunks, W + 1, D, dtype=torch.float32, device=x.device) if need_w else None
    (xb, xt, _), (yb, yt, _) = x.stride(), dy.stride()
    v = math.gcd(8, D, xb, xt, yb, yt)
    run = _bwd_launch(
        W, v, p, silu, bias is not None, state is not None, dfinal is not None, need_x, need_w, t.cu is not None
    )  # fmt: skip
    run(
        t.chunks * call.strips,
        (x, weight, x if bias is None else bias, x if state is None else state, dy,
         x if dfinal is None else dfinal, x if dx is None else dx, x if part is None else part,
         x if t.rows is None else t.rows, x if t.cu is None else t.cu, call.T, t.per_sequence, p.rows,
         D // v, xb // v, xt // v, yb // v, yt // v),
        (x, weight, bias, state, dy, dfinal, t.cu),
    )  # fmt: skip
    if part is None:
        return dx, None, None
    dw = torch.empty_like(weight)
    db = None if bias is None else torch.empty_like(bias)
    total, grid = _weight_launch(W, D, db is not None)
    total(grid, (part, dw, dw if db is None else db, t.chunks, D), (part, dw, db))
    return dx, dw, db


def conv_final(call: Call, x: Tensor, state: Tensor | None) -> Tensor:
    """The last `W` inputs ``[N, D, W]``."""
    t, D = call.table, call.D
    final = torch.empty(t.sequences, D, call.W, dtype=x.dtype, device=x.device)
    block = min(256, pow2(D))
    _final(
        t.sequences * -(-D // block),
        (x, x if state is None else state, final, x if t.cu is None else t.cu, call.T, D, x.stride(0), x.stride(1)),
        {"W": call.W, "BD": block, "HAS_STATE": state is not None, "VARLEN": t.varlen},
        {"num_warps": 2},
        (x, state, t.cu),
    )
    return final


def conv_state_grad(
    call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, dy: Tensor, dfinal: Tensor | None,
    silu: bool,
) -> Tensor:  # fmt: skip
    """Gradient of the initial state ``[N, D, W]``."""
    t, D = call.table, call.D
    dstate = torch.empty_like(state)
    block = min(256, pow2(D))
    _state(
        t.sequences * -(-D // block),
        (x, weight, x if bias is None else bias, state, dy, x if dfinal is None else dfinal, dstate,
         x if t.cu is None else t.cu, call.T, D, x.stride(0), x.stride(1), dy.stride(0), dy.stride(1)),
        {"W": call.W, "BD": block, "SILU": silu, "HAS_BIAS": bias is not None, "HAS_DFINAL": dfinal is not None,
         "VARLEN": t.varlen},
        {"num_warps": 2},
        (x, weight, bias, state, dy, dfinal, t.cu),
    )  # fmt: skip
    return dstate


def conv_update(
    x: Tensor, cache: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, silu: bool
) -> Tensor:
    """``y`` ``[N, D]`` for ``x`` ``[N, D]``; ``cache`` ``[N, D, W]``, contiguous, is shifted in place."""
    N, D = x.shape
    y = torch.empty(N, D, dtype=x.dtype, device=x.device)
    block = min(256, pow2(D))
    with on_device(x):
        _update(
            N * -(-D // block),
            (x, cache, x if residual is None else residual, weight, x if bias is None else bias, y, D, x.stride(0),
             0 if residual is None else residual.stride(0)),
            {"W": cache.shape[2], "BD": block, "SILU": silu, "HAS_BIAS": bias is not None,
             "HAS_RES": residual is not None},
            {"num_warps": 2},
            (x, cache, residual, weight, bias),
        )  # fmt: skip
    return y


def conv_updates(rows: list[Tensor], caches: list[Tensor], parameters: list[Tensor | None], silu: bool) -> list[Tensor]:
    """:func:`conv_update` of three inputs; ``parameters`` are three weights and three biases or None."""
    q, k, v = rows
    ys = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in rows]
    widths = [x.shape[1] for x in rows]
    block = min(256, pow2(max(widths)))
    bias = parameters[3] is not None
    filled = [q if p is None else p for p in parameters]
    with on_device(q):
        _updates(
            q.shape[0] * sum(-(-D // block) for D in widths),
            (q, k, v, *caches, *filled, *ys, *widths, q.stride(0), k.stride(0), v.stride(0)),
            {"W": caches[0].shape[2], "BD": block, "SILU": silu, "HAS_BIAS": bias},
            {"num_warps": 2},
            (q, k, v, *caches, *parameters),
        )
    return ys
