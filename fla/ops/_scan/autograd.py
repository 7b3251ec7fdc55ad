# SPDX-License-Identifier: MIT
"""Launches and autograd of the elementwise scan on the Triton kernels."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fla.backends import needs_backward
from fla.ops._common.first_call import first_call
from fla.ops._common.launch import Launcher, aligned, on_device
from fla.ops._common.policy import Chip, chip_of
from fla.ops._common.room import like
from fla.ops._common.single import once, savable
from fla.ops._common.tape import Body, refuse_transforms, taped
from fla.ops._scan.kernels import scan_bwd_kernel, scan_fwd_kernel
from fla.ops._scan.policy import DECODE_TOKENS, ScanPlan, scan_plan, stretches

_forward = Launcher(scan_fwd_kernel)
_backward = Launcher(scan_bwd_kernel)


class _Work:
    """Sizes of a call, and its launch plan."""

    def __init__(self, x: Tensor, cu: Tensor | None, plan: ScanPlan | None, segments: int | None) -> None:
        self.B, self.T, self.D = x.shape
        self.N = self.B if cu is None else cu.numel() - 1
        chip = chip_of(x.device)
        self.plan = plan or scan_plan(chip, self.D, self.T <= DECODE_TOKENS)
        if segments is None:
            self.segments, self.span = stretches(self.plan, chip, self.B, self.D, self.T)
        else:
            tile = self.plan.tokens * self.plan.runs
            self.span = -(-self.T // (segments * tile)) * tile
            self.segments = -(-self.T // self.span)
        self.scalars = (self.T, self.N, max(self.N - 1, 0).bit_length(), self.span, self.segments)
        self.grid = -(-self.D // self.plan.channels) * self.segments * self.B
        self.meta = {"D": self.D, "BT": self.plan.tokens, "W": self.plan.runs, "BD": self.plan.channels}
        fast = chip.vendor == "nvidia"
        self.forward = {"FAST": fast, "STAGES": self.plan.forward.stages}
        self.backward = {"FAST": fast, "STAGES": self.plan.backward.stages}

    def summaries(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if self.segments == 1:
            return None, None
        both = torch.empty(2, self.B, self.segments, self.D, dtype=torch.float32, device=x.device)
        return both[0], both[1]


def scan_forward(
    x: Tensor, g: Tensor, h0: Tensor | None, cu: Tensor | None, final: bool, plan: ScanPlan | None = None,
    segments: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """``(o, final state or None)`` of contiguous tensors."""
    w = _Work(x, cu, plan, segments)
    o = like(x)
    ht = None
    if final:
        # An empty sequence writes nothing: its state stays.
        if cu is None and x.numel():
            ht = torch.empty(w.N, w.D, dtype=torch.float32, device=x.device)
        elif h0 is None:
            ht = torch.zeros(w.N, w.D, dtype=torch.float32, device=x.device)
        else:
            ht = h0.to(torch.float32, copy=True)
    if x.numel() == 0 or w.N == 0:
        return o, ht
    factors, sums = w.summaries(x)
    given = (x, g, h0, cu)
    options = {"num_warps": w.plan.forward.warps}
    if factors is not None:
        _forward(
            w.grid, (x, g, h0, cu, None, None, factors, sums, *w.scalars),
            {**w.meta, "SUMMARY": True, "FINAL": False, **w.forward}, options, given,
        )  # fmt: skip
    _forward(
        w.grid, (x, g, h0, cu, o, ht, factors, sums, *w.scalars),
        {**w.meta, "SUMMARY": False, "FINAL": final, **w.forward}, options,
        (*given, factors),
    )  # fmt: skip
    return o, ht


def scan_backward(
    do: Tensor, g: Tensor, o: Tensor, h0: Tensor | None, dht: Tensor | None, cu: Tensor | None, initial: bool,
    plan: ScanPlan | None = None, segments: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """``(dx, dg, dh0)`` from contiguous tensors; ``dh0`` with ``initial`` only."""
    w = _Work(do, cu, plan, segments)
    dx, dg = like(o), like(g)
    dh0 = None
    if initial:
        assert h0 is not None
        if cu is None and do.numel():
            dh0 = like(h0)
        else:
            dh0 = torch.zeros_like(h0) if dht is None else dht.to(h0.dtype, copy=True)
    if do.numel() == 0 or w.N == 0:
        return dx, dg, dh0
    factors, sums = w.summaries(do)
    given = (do, g, o, h0, dht, cu, dh0)
    options = {"num_warps": w.plan.backward.warps}
    if factors is not None:
        _backward(
            w.grid, (do, g, o, h0, dht, cu, None, None, None, factors, sums, *w.scalars),
            {**w.meta, "SUMMARY": True, "INITIAL": False, **w.backward}, options, given,
        )  # fmt: skip
    _backward(
        w.grid, (do, g, o, h0, dht, cu, dx, dg, dh0, factors, sums, *w.scalars),
        {**w.meta, "SUMMARY": False, "INITIAL": initial, **w.backward}, options,
        (*given, factors),
    )  # fmt: skip
    return dx, dg, dh0


@functools.lru_cache(maxsize=256)
def _tapes(shape: tuple[int, ...], packed: int | None, chip: Chip) -> dict[Any, Any]:
    return {}


@functools.lru_cache(maxsize=256)
def _sent(shape: tuple[int, ...], packed: int | None, chip: Chip) -> set[Any]:
    return set()


def _scan(x: Tensor, g: Tensor, h0: Tensor | None, cu: Tensor | None, final: bool) -> tuple[Tensor | None, ...]:
    return scan_forward(x, g, h0, cu, final)


def _scan_backward(
    g: Tensor, o: Tensor, h0: Tensor | None, cu: Tensor | None, do: Tensor, dht: Tensor | None, initial: bool
) -> tuple[Tensor | None, ...]:
    return scan_backward(do, g, o, h0, dht, cu, initial)


def _run(what: Body, inputs: tuple[Tensor | None, ...], flag: bool) -> tuple[Any, ...]:
    """``what``, written out once for its sizes. Its second tensor has the shape of all, its fourth is cu_seqlens."""
    x, cu = inputs[1], inputs[3]
    assert x is not None
    tapes = _tapes(x.shape, None if cu is None else cu.numel(), chip_of(x.device))
    found: tuple[Any, ...] = taped(tapes, (what, flag), what, inputs, flag)
    return found


def _compile_ahead(inputs: tuple[Tensor | None, ...], final: bool) -> None:
    """Have the kernels of a training step compiled side by side at its first call."""
    x, _, _, cu = inputs
    assert x is not None
    known = _sent(x.shape, None if cu is None else cu.numel(), chip_of(x.device))

    def size() -> Any:
        work = _Work(x, cu, None, None)
        return Scan, work.plan, work.D, work.segments > 1, x.numel() > 0

    def step(*given: Tensor | None) -> None:
        _, g, h0, cu = given
        assert g is not None
        o, _ = scan_forward(*given, final)  # type: ignore[call-arg, arg-type]
        scan_backward(o, g, o, h0, None, cu, h0 is not None)

    first_call(known, final, size, inputs, step)


class Scan(torch.autograd.Function):
    """``(o, final state or None)``; keeps the gates and the outputs."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, g: Tensor, h0: Tensor | None, cu: Tensor | None, final: bool
    ) -> tuple[Tensor, Tensor | None]:
        inputs = (x, g, h0, cu)
        _compile_ahead(inputs, final)
        o, ht = _run(_scan, inputs, final)
        ctx.save_for_backward(g, o, h0, savable(cu))
        ctx.set_materialize_grads(False)
        return o, ht

    @staticmethod
    @once
    def backward(ctx: Any, do: Tensor | None, dht: Tensor | None = None) -> tuple[Tensor | None, ...]:
        g, o, h0, cu = ctx.saved_tensors
        if do is None and dht is None:
            return (None,) * 5
        do = torch.zeros_like(o) if do is None else aligned(do)
        dht = None if dht is None else aligned(dht)
        with on_device(o):
            dx, dg, dh0 = _run(_scan_backward, (g, o, h0, cu, do, dht), ctx.needs_input_grad[2])
        return dx, dg, dh0, None, None


def scan(
    x: Tensor, g: Tensor, initial_state: Tensor | None, output_final_state: bool, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """``h_t = exp(g_t) h_{t-1} + x_t`` over ``[B, T, D]``; differentiable. Arguments have been checked."""
    x, g = x.contiguous(), g.contiguous()
    h0 = None if initial_state is None else initial_state.contiguous()
    cu = None if cu_seqlens is None else cu_seqlens.contiguous()
    inputs = (x, g, h0, cu)
    refuse_transforms(inputs)
    with on_device(x):
        if needs_backward((x, g, h0)):
            return Scan.apply(*inputs, output_final_state)
        o, ht = _run(_scan, inputs, output_final_state)
    return o, ht
