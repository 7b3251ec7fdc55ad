# SPDX-License-Identifier: MIT
"""References of the eight modules of table.py, as large as they are timed: in float64, the losses in float32 by chunk.

Each takes the inputs, the parameters, the gradients of the outputs and what was found (outputs, then gradients of
inputs and parameters), and returns the RMS error of every one of these relative to its RMS.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Found = list[list[Tensor]]


def ratio(want: Tensor, got: Tensor) -> float:
    want, got = want.double(), got.double()
    return float((want - got).square().mean().sqrt() / (want.square().mean().sqrt() + 1e-12))


def _by_autograd(fn: Callable[..., Any]) -> Callable[..., list[float]]:
    def run(inputs: list[Tensor], parameters: list[Tensor], grads: list[Tensor], found: Found) -> list[float]:
        wide = [x.detach().double().requires_grad_() for x in (*inputs, *parameters)]
        out = fn(*wide)
        out = out if isinstance(out, tuple) else (out,)
        want = torch.autograd.grad(out, wide, [g.double() for g in grads])
        pairs = zip((*out, *want), (*found[0], *found[1]), strict=True)
        return [ratio(w.detach(), g) for w, g in pairs]

    return run


def _rms(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w


def _conv(x: Tensor, w: Tensor) -> Tensor:
    T, W = x.shape[1], w.shape[-1]
    past = F.pad(x, (0, 0, W - 1, 0))
    return F.silu(sum(past[:, i : i + T] * w[:, 0, i] for i in range(W)))  # type: ignore[arg-type]


def _turn(x: Tensor) -> Tensor:
    T, R = x.shape[1], x.shape[-1] // 2
    # The tables are in the dtype of the inputs, which is part of what the function is.
    angle = torch.outer(
        torch.arange(T, device=x.device, dtype=torch.float32),
        10000.0 ** -(torch.arange(0, 2 * R, 2, device=x.device, dtype=torch.float32) / (2 * R)),
    )
    cos, sin = (t.to(torch.bfloat16).double()[:, None] for t in (angle.cos(), angle.sin()))
    a, b = x[..., :R], x[..., R:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def _cross_entropy(inputs: list[Tensor], parameters: Any, grads: Any, found: Found) -> list[float]:
    logits, target = inputs[0].detach(), inputs[1]
    n, total, off, size = len(target), 0.0, 0.0, 0.0
    # A loss that wrote its gradient over the logits is right if that gradient is: it cannot be compared here.
    for i in range(0, n, 512):
        z = logits[i : i + 512].float()
        lse = z.logsumexp(-1)
        rows = torch.arange(len(z), device=z.device)
        total += float((lse - z[rows, target[i : i + 512]]).double().sum())
        want = (z - lse[:, None]).exp_()
        want[rows, target[i : i + 512]] -= 1
        want /= n
        off += float((want - found[1][0][i : i + 512].float()).square().sum(dtype=torch.float64))
        size += float(want.square().sum(dtype=torch.float64))
    loss = float(found[0][0])
    return [abs(loss - total / n) / (total / n), (off / size) ** 0.5]


def _linear_cross_entropy(inputs: list[Tensor], parameters: Any, grads: Any, found: Found) -> list[float]:
    x, target, w = inputs[0].detach(), inputs[1], inputs[2].detach().float()
    n, total = len(target), 0.0
    dw, dx = torch.zeros_like(w), torch.empty_like(x, dtype=torch.float32)
    for i in range(0, n, 1024):
        h = x[i : i + 1024].float()
        # Rounded as the layer's logits are.
        z = (h @ w.t()).to(x.dtype).float()
        lse = z.logsumexp(-1)
        rows = torch.arange(len(z), device=z.device)
        total += float((lse - z[rows, target[i : i + 1024]]).double().sum())
        z = (z - lse[:, None]).exp_()
        z[rows, target[i : i + 1024]] -= 1
        z /= n
        dx[i : i + 1024] = z @ w
        dw.addmm_(z.t(), h)
    loss = float(found[0][0])
    return [abs(loss - total / n) / (total / n), ratio(dx, found[1][0]), ratio(dw, found[1][1])]


# In the order of table.py.
REFERENCES: list[Callable[..., list[float]]] = [
    _by_autograd(lambda x, w: _rms(x, w, 1e-5)),
    _by_autograd(lambda x, g, w: _rms(x, w, 1e-5) * F.silu(g)),
    _by_autograd(lambda x: x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()),
    _by_autograd(lambda x, y: F.silu(x) * y),
    _by_autograd(_conv),
    _by_autograd(lambda q, k: (_turn(q), _turn(k))),
    _cross_entropy,
    _linear_cross_entropy,
]
