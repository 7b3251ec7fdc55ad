# SPDX-License-Identifier: MIT
"""Small ops with every kind of argument and output structure, and the least that stands in for a dispatched op."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fla.backends._compile import bridge


class ToyOp:
    """What the bridge asks of a dispatched op, without a registry."""

    operation = "toy"
    inplace = False
    pair: Any = None
    validate: Any = None

    def __init__(self, fn: Callable[..., Any], outputs: Callable[..., Any]) -> None:
        self.fn, self.outputs = fn, outputs
        self.name = fn.__name__
        self.signature = inspect.signature(fn)
        self.runs: list[bool] = []
        self.call = bridge(self)

    def run(self, args: tuple[Any, ...]) -> Any:
        self.runs.append(torch.is_grad_enabled())
        return self.fn(*args)

    def training_candidate(self, args: tuple[Any, ...]) -> None:
        return None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return self.call(self, tuple(bound.arguments.values()))


def decayed(
    q: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    window: int = 2,
    mode: str = "sum",
    dtype: torch.dtype | None = None,
    cp_context: Any = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """o = (cumsum(q) * v + state) * scale, q and v [B, T, K]; the final state is the last row."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o = q.cumsum(1) if mode == "sum" else q
    o = o * v * window
    if initial_state is not None:
        o = o + initial_state[:, None]
    if cu_seqlens is not None:
        o = o + cu_seqlens[-1]
    o = (o * scale).to(dtype or q.dtype)
    return o, (o[:, -1] if output_final_state else None)


def _decayed_outputs(q, v, scale, initial_state, output_final_state, cu_seqlens, window, mode, dtype, cp_context):
    o = torch.empty_like(q, dtype=dtype or q.dtype)
    return o, (o.new_empty(q.shape[0], q.shape[2]) if output_final_state else None)


def stateful(
    q: torch.Tensor, initial_state: tuple[torch.Tensor, torch.Tensor | None] | None = None, return_h: bool = False
) -> Any:
    """A state of two parts in and out, and optionally a third output."""
    kv = q.square().sum(1)
    z = q.sum(1)
    if initial_state is not None:
        kv = kv + initial_state[0]
        if initial_state[1] is not None:
            z = z + initial_state[1]
    o = q * kv[:, None] + z[:, None]
    return (o, (kv, z), q.transpose(0, 1)) if return_h else (o, (kv, z))


def _stateful_outputs(q, initial_state, return_h):
    s = q.new_empty(q.shape[0], q.shape[2])
    o = torch.empty_like(q)
    return (o, (s, torch.empty_like(s)), q.new_empty(q.shape[1], q.shape[0], q.shape[2])) if return_h else (o, (s, s))


def plain(x: torch.Tensor, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
    """One tensor out; `scale` is a number or a tensor. A scale of 1.0 returns the input itself."""
    return x if isinstance(scale, float) and scale == 1.0 else x * scale


def _plain_outputs(x, scale):
    return torch.empty_like(x)


class CubePair:
    """The forward keeps 3 x^2, the backward multiplies."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def forward(self, x: torch.Tensor, gain: float) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        self.calls.append("forward")
        return gain * x**3, (3 * gain * x**2,)

    def saved(self, x: torch.Tensor, gain: float) -> Sequence[torch.Tensor]:
        return (torch.empty_like(x),)

    def backward(self, args, saved, grads, needed) -> Sequence[torch.Tensor | None]:
        self.calls.append("backward")
        return [saved[0] * grads[0]]


def cube(x: torch.Tensor, gain: float = 1.0) -> torch.Tensor:
    return gain * x**3


def make_decayed() -> ToyOp:
    return ToyOp(decayed, _decayed_outputs)


def make_stateful() -> ToyOp:
    return ToyOp(stateful, _stateful_outputs)


def make_plain() -> ToyOp:
    return ToyOp(plain, _plain_outputs)


def make_cube() -> ToyOp:
    op = ToyOp(cube, lambda x, gain: torch.empty_like(x))
    op.pair = CubePair()
    return op
