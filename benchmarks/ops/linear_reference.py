# SPDX-License-Identifier: MIT
"""Token-by-token reference of linear attention with a scalar decay in float64, with gradients, and random inputs."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

GATES = (None, "token", "head")


def make_inputs(
    B: int = 1, T: int = 64, H: int = 1, K: int = 64, V: int | None = None, *, dtype: torch.dtype = torch.float32,
    device: str = "cpu", seed: int = 0, gate: str | None = "token", sequences: int | None = None, initial: bool = False,
    v_first: bool = False, shift: float = 3.0,
) -> dict[str, Tensor]:  # fmt: skip
    """Random inputs; ``gate`` is one of `GATES`."""
    V = V or K
    gen = torch.Generator(device=device).manual_seed(seed)
    rn = lambda *s: torch.randn(*s, generator=gen, device=device)
    x = {"q": rn(B, T, H, K).to(dtype), "k": rn(B, T, H, K).to(dtype), "v": rn(B, T, H, V).to(dtype)}
    if gate == "token":
        x["g"] = F.logsigmoid(rn(B, T, H) + shift)
    elif gate == "head":
        x["g_gamma"] = torch.log1p(-torch.exp2(-5.0 - torch.arange(H, device=device)))
    if initial:
        n = B if sequences is None else sequences
        x["initial_state"] = rn(n, H, *((V, K) if v_first else (K, V)))
    return x


def recurrence(
    x: dict[str, Tensor], *, scale: float | None = None, v_first: bool = False, cu: list[int] | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o, final state) in the dtype of ``x``, which should be float64."""
    q, k, v = x["q"], x["k"], x["v"]
    B, T, H, K = q.shape
    q = q * (K**-0.5 if scale is None else scale)
    decay = torch.ones_like(q[..., 0])
    if "g" in x:
        decay = x["g"].exp()
    elif "g_gamma" in x:
        decay = x["g_gamma"].exp().expand(B, T, H)
    spans = [(b, 0, T) for b in range(B)] if cu is None else [(0, a, e) for a, e in itertools.pairwise(cu)]
    rows: list[list[Tensor]] = [[v.new_zeros(H, v.shape[-1])] * T for _ in range(B)]
    states, h0 = [], x.get("initial_state")
    for i, (b, lo, hi) in enumerate(spans):
        S = v.new_zeros(H, K, v.shape[-1])
        if h0 is not None:
            S = h0[i].mT if v_first else h0[i]
        for t in reversed(range(lo, hi)) if reverse else range(lo, hi):
            S = S * decay[b, t][:, None, None] + k[b, t][:, :, None] * v[b, t][:, None, :]
            rows[b][t] = torch.einsum("hk,hkv->hv", q[b, t], S)
        states.append(S.mT if v_first else S)
    return torch.stack([torch.stack(r) for r in rows]), torch.stack(states)


def with_gradients(x: dict[str, Tensor], do: Tensor, dht: Tensor, **kw) -> dict[str, Tensor]:
    """Outputs "o" and "ht" and the gradient of every input but g_gamma under its own name, all float64."""
    with torch.enable_grad():
        y = {n: t.detach().double().requires_grad_(n != "g_gamma") for n, t in x.items()}
        o, ht = recurrence(y, **kw)
        leaves = {n: t for n, t in y.items() if t.requires_grad}
        loss = (o * do.double()).sum() + (ht * dht.double()).sum()
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    zero = {n: torch.zeros_like(t) for n, t in leaves.items()}
    grads = [zero[n] if t is None else t for n, t in zip(leaves, grads, strict=True)]
    return {"o": o.detach(), "ht": ht.detach(), **dict(zip(leaves, grads, strict=True))}


def normalized(
    x: dict[str, Tensor], *, scale: float | None = None, cu: list[int] | None = None, reverse: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """(o, final state, sum of keys `[N, 1, H, K]`) of normalised linear attention, token by token; ``x["z"]`` as given
    to the op."""
    ones = torch.ones_like(x["v"][..., :1])
    h0, z = x.get("initial_state"), x.get("z")
    top = {n: x[n] for n in ("q", "k", "v")} | ({} if h0 is None else {"initial_state": h0})
    low = {"q": x["q"], "k": x["k"], "v": ones} | ({} if z is None else {"initial_state": z[:, 0].unsqueeze(-1)})
    o, ht = recurrence(top, scale=scale, cu=cu, reverse=reverse)
    den, zt = recurrence(low, scale=scale, cu=cu, reverse=reverse)
    return o / (den + 1e-10), ht, zt.squeeze(-1).unsqueeze(1)


def normalized_with_gradients(
    x: dict[str, Tensor], weights: list[Tensor], **kw
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Results of `normalized` and the gradients of their sum with ``weights``, all float64."""
    with torch.enable_grad():
        y = {n: t.detach().double().requires_grad_() for n, t in x.items()}
        out = normalized(y, **kw)
        loss = sum((a * w.double()).sum() for a, w in zip(out, weights, strict=True))
        grads = torch.autograd.grad(loss, list(y.values()))
    return [a.detach() for a in out], dict(zip(y, grads, strict=True))
