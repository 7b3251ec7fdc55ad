# SPDX-License-Identifier: MIT
"""Token-by-token reference of linear attention with a decay per channel in float64, with gradients, and inputs."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Inputs = dict[str, Tensor]


def make_inputs(
    B: int = 1, T: int = 64, H: int = 1, K: int = 64, V: int | None = None, *, dtype: torch.dtype = torch.float32,
    device: str = "cpu", seed: int = 0, gate: str = "gk", gate_dtype: torch.dtype = torch.float32,
    sequences: int | None = None, initial: bool = False, v_first: bool = False, bonus: bool = False,
    strength: float = 1.0, shift: float = 0.0, low: float | None = None,
) -> Inputs:  # fmt: skip
    """Random inputs. ``gate``: "gk", "gv" or "both"; ``strength`` and ``shift`` of ``logsigmoid(randn + shift)``;
    every fifth token has gates ``low``."""
    V = V or K
    gen = torch.Generator(device=device).manual_seed(seed)
    rn = lambda *s: torch.randn(*s, generator=gen, device=device)
    x = {"q": rn(B, T, H, K).to(dtype), "k": rn(B, T, H, K).to(dtype), "v": rn(B, T, H, V).to(dtype)}
    for name, width in (("gk", K), ("gv", V)):
        if gate in (name, "both"):
            g = F.logsigmoid(rn(B, T, H, width) + shift) * strength
            if low is not None:
                g[:, ::5] = low
            x[name] = g.to(gate_dtype)
    if bonus:
        x["bonus"] = rn(H, K)
    if initial:
        n = B if sequences is None else sequences
        x["initial_state"] = rn(n, H, *((V, K) if v_first else (K, V)))
    return x


def recurrence(
    x: Inputs, *, scale: float | None = None, v_first: bool = False, cu: list[int] | None = None, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    """(o, final state) in the dtype of ``x``, which should be float64."""
    q, k, v, u = x["q"], x["k"], x["v"], x.get("bonus")
    B, T, H, K = q.shape
    V = v.shape[-1]
    q = q * (K**-0.5 if scale is None else scale)
    ek = x["gk"].exp() if "gk" in x else torch.ones_like(k)
    ev = x["gv"].exp() if "gv" in x else torch.ones_like(v)
    spans = [(b, 0, T) for b in range(B)] if cu is None else [(0, a, e) for a, e in itertools.pairwise(cu)]
    rows: list[list[Tensor]] = [[v.new_zeros(H, V)] * T for _ in range(B)]
    states, h0 = [], x.get("initial_state")
    for i, (b, lo, hi) in enumerate(spans):
        S = v.new_zeros(H, K, V)
        if h0 is not None:
            S = h0[i].mT if v_first else h0[i]
        for t in reversed(range(lo, hi)) if reverse else range(lo, hi):
            new = k[b, t][:, :, None] * v[b, t][:, None, :]
            old, S = S, S * (ek[b, t][:, :, None] * ev[b, t][:, None, :]) + new
            rows[b][t] = torch.einsum("hk,hkv->hv", q[b, t], S if u is None else old + u[:, :, None] * new)
        states.append(S.mT if v_first else S)
    return torch.stack([torch.stack(r) for r in rows]), torch.stack(states)


def with_gradients(x: Inputs, do: Tensor, dht: Tensor, **kw: Any) -> Inputs:
    """Outputs "o" and "ht" and the gradient of every input under its own name, all float64."""
    with torch.enable_grad():
        y = {n: t.detach().double().requires_grad_() for n, t in x.items()}
        o, ht = recurrence(y, **kw)
        loss = (o * do.double()).sum() + (ht * dht.double()).sum()
        grads = torch.autograd.grad(loss, list(y.values()), allow_unused=True, materialize_grads=True)
    return {"o": o.detach(), "ht": ht.detach(), **dict(zip(y, grads, strict=True))}


def ratio(a: Tensor, b: Tensor) -> float:
    """RMS of the difference over RMS of ``b``; differences under 1e-6 of any size count as none."""
    d = a.double() - b.double()
    if bool((d.abs() <= 1e-6).all()):
        return 0.0
    return (d.square().mean().sqrt() / (b.double().square().mean().sqrt() + 1e-8)).item()
