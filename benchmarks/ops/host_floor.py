# SPDX-License-Identifier: MIT
"""What any op pays on the host: one kernel, launched as ours are, in one autograd function with as many inputs.

The kernel lasts as long as the op's own do, so as much of the host's time hides behind it. Results are allocated, as
an op must, and nothing else is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from fla.ops._common.launch import Launcher, on_device
from fla.ops._common.room import like
from fla.ops._common.single import applied, once
from fla.ops._common.tape import Known


@triton.jit(do_not_specialize=["ns"])
def wait_ns(x, ns):  # ``x``: tells the device
    start = globaltimer()
    now = start
    while now - start < ns:
        now = globaltimer()


_wait = Launcher(wait_ns)


def _launch(x: Tensor, ns: int) -> None:
    _wait(1, (x, ns), {}, {"num_warps": 1}, (x,))


def _nothing(x: Tensor, call: Any) -> tuple[Tensor]:
    _launch(x, 0)
    return (x,)


def _forward(*inputs: Any) -> tuple[Tensor]:
    *leaves, _, ns = inputs
    o = like(leaves[2])
    _launch(o, ns)
    return (o,)


def _backward(*inputs: Any) -> tuple[Tensor, ...]:
    *leaves, _, _, ns = inputs
    first = like(leaves[0])
    _launch(first, ns)
    return (first, *map(like, leaves[1:]))


class _Floor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, known: Known, ns: tuple[int, int], *leaves: Tensor) -> Tensor:
        (o,) = known.run("forward", _forward, leaves, ns[0])
        ctx.save_for_backward(*leaves)
        ctx.known, ctx.ns = known, ns[1]
        return o

    @staticmethod
    @once
    def backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
        with on_device(do):
            return (None, None, *ctx.known.run("backward", _backward, (*ctx.saved_tensors, do), ctx.ns))


_floor = applied(_Floor)


def one_launch(x: Tensor) -> Callable[[], Any]:
    """A kernel that does nothing, launched as those of ops are."""
    known = Known(None)
    return lambda: known.run("nothing", _nothing, (x,))


def floors(
    leaves: list[Tensor], do: Tensor, forward_ms: float, backward_ms: float
) -> tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any]]:
    """Inference, forward of training, forward and backward with inputs like these."""
    known, ns = Known(None), (round(forward_ms * 1e6), round(backward_ms * 1e6))
    plain = [x.detach() for x in leaves]

    def inference() -> Any:
        with torch.no_grad(), on_device(plain[0]):
            return known.run("infer", _forward, tuple(plain), ns[0])

    def forward() -> Any:
        with on_device(leaves[0]):
            return _floor(known, ns, *leaves)

    return inference, forward, lambda: torch.autograd.grad(forward(), leaves, do)
