# SPDX-License-Identifier: MIT
"""The ground truth of the linear family: a token recurrence in float64, and the comparison of a call with it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

# RMS error over RMS of the truth, by dtype: (outputs and states, gradients).
TOLERANCE = {
    torch.float64: (1e-10, 1e-10),
    torch.float32: (1e-5, 1e-5),
    torch.float16: (5e-3, 1e-2),
    torch.bfloat16: (5e-3, 1e-2),
}
GATES = ("g", "gk", "gv")


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    h0: Tensor | None = None,
    z0: Tensor | None = None,
    scale: float | None = None,
    offsets: list[int] | None = None,
    reverse: bool = False,
    normalize: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, states [N, H, K, V] and sums of keys [N, H, K], token by token."""
    if offsets is not None:
        parts = []
        for n, (a, b) in enumerate(itertools.pairwise(offsets)):
            one = [None if x is None else x[:, a:b] for x in (q, k, v, g, gk, gv)]
            states = [None if x is None else x[n : n + 1] for x in (h0, z0)]
            parts.append(recurrence(*one, *states, scale=scale, reverse=reverse, normalize=normalize))
        o, S, z = (list(x) for x in zip(*parts, strict=True))
        return torch.cat(o, 1), torch.cat(S), torch.cat(z)
    B, T, H, K = q.shape
    scale = K**-0.5 if scale is None else scale
    S = q.new_zeros(B, H, K, v.shape[-1]) if h0 is None else h0
    z = q.new_zeros(B, H, K) if z0 is None else z0
    rows: dict[int, Tensor] = {}
    for t in reversed(range(T)) if reverse else range(T):
        if g is not None:
            S = S * g[:, t].exp()[..., None, None]
        if gk is not None:
            S = S * gk[:, t].exp()[..., None]
        if gv is not None:
            S = S * gv[:, t].exp()[..., None, :]
        S = S + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        z = z + k[:, t]
        rows[t] = scale * torch.einsum("bhk,bhkv->bhv", q[:, t], S)
        if normalize:
            rows[t] = rows[t] / (scale * (q[:, t] * z).sum(-1, keepdim=True) + 1e-10)
    return torch.stack([rows[t] for t in range(T)], 1) if T else v * 1, S, z


def error(got: Tensor, truth: Tensor) -> float:
    """RMS of the difference over RMS of the truth; infinite for NaN."""
    if got.numel() == 0:
        return 0.0
    difference = (got.double() - truth.double()).pow(2).mean().sqrt()
    ratio = (difference / (truth.double().pow(2).mean().sqrt() + 1e-8)).item()
    return ratio if ratio == ratio else float("inf")


def gates(kind: str, shape: tuple[int, ...]) -> Tensor:
    """Log decays: mild; strong (-20 on a third of the steps); cut (also minus infinity on a tenth)."""
    x = torch.nn.functional.logsigmoid(torch.randn(shape, dtype=torch.float64))
    if kind in ("strong", "cut"):
        x = torch.where(torch.rand(shape) < 0.3, -20.0, x)
    if kind == "cut":
        x = torch.where(torch.rand(shape) < 0.1, -torch.inf, x)
    return torch.zeros_like(x) if kind == "zero" else x


def inputs(
    B: int,
    T: int,
    H: int,
    K: int,
    V: int,
    *names: str,
    dtype: torch.dtype = torch.float32,
    N: int | None = None,
    gate: str = "mild",
) -> dict[str, Tensor]:
    """Leaf tensors q, k, v, h0 and the named gates; gates of 16-bit calls are float32."""
    torch.manual_seed(B + 10 * T + 100 * K + V)
    shapes = {"q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, H, V), "h0": (N or B, H, K, V)}
    data = {name: torch.randn(shape, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    for name in names:
        data[name] = gates(gate, {"g": (B, T, H), "gk": (B, T, H, K), "gv": (B, T, H, V)}[name]).to(wide)
    return {name: x.requires_grad_() for name, x in data.items()}


def compare(call: Callable[..., tuple[Tensor, Tensor]], data: dict[str, Tensor], **truth_options: object) -> None:
    """Check outputs, states and all gradients of ``call(**data) -> (o, state [N, H, K, V])``."""
    exact = {name: x.detach().double().requires_grad_() for name, x in data.items()}
    o, S, _ = recurrence(**exact, **truth_options)
    got_o, got_S = call(**data)
    assert got_o.dtype == data["q"].dtype
    assert got_S.dtype == (torch.float64 if got_o.dtype == torch.float64 else torch.float32)
    do, dS = torch.randn_like(o), torch.randn_like(S)
    ((o * do).sum() + (S * dS).sum()).backward()
    ((got_o.double() * do).sum() + (got_S.double() * dS).sum()).backward()
    forward, backward = TOLERANCE[data["q"].dtype]
    errors = {"o": error(got_o, o), "state": error(got_S, S)}
    assert {n: e for n, e in errors.items() if not e < forward} == {}
    errors = {f"d{n}": error(x.grad, exact[n].grad) for n, x in data.items()}
    assert {n: e for n, e in errors.items() if not e < backward} == {}
    assert all(x.grad.dtype == x.dtype for x in data.values())


@pytest.fixture(scope="session")
def truth() -> SimpleNamespace:
    return SimpleNamespace(recurrence=recurrence, error=error, gates=gates, inputs=inputs, compare=compare)


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is NaN, so that reading a number nobody wrote shows."""
    plain = {name: getattr(torch, name) for name in ("empty", "empty_like")}

    def poison(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: object, **kwargs: object) -> Tensor:
            x = make(*args, **kwargs)
            return x.fill_(torch.nan) if x.is_floating_point() else x

        return made

    for name, make in plain.items():
        monkeypatch.setattr(torch, name, poison(make))
    monkeypatch.setattr(Tensor, "new_empty", poison(Tensor.new_empty))
