# SPDX-License-Identifier: MIT
"""Token-by-token reference of the scalar-decay delta rule in float64, with gradients, and random inputs for it."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

NAMES = ("q", "k", "v", "g", "beta", "p", "A_log", "dt_bias", "initial_state")


def make_inputs(
    B: int = 1, T: int = 64, H: int = 1, HV: int | None = None, K: int = 64, V: int | None = None, *,
    dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0, gate: str | None = "given",
    sequences: int | None = None,
    initial: bool = False, v_first: bool = False, shift: float = 3.0, norm: bool = True, raw_beta: bool = False,
    read: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """Random inputs; ``gate`` is None, "given" or "kernel"; keys are unit vectors already where ``norm`` is False.
    ``read``: a read key ``p`` near k, as Comba has."""
    HV, V = HV or H, V or K
    gen = torch.Generator(device=device).manual_seed(seed)
    rn = lambda *s: torch.randn(*s, generator=gen, device=device)
    x = {"q": rn(B, T, H, K), "k": rn(B, T, H, K), "v": rn(B, T, HV, V).to(dtype)}
    for n in ("q", "k"):
        x[n] = (x[n] if norm else F.normalize(x[n], dim=-1)).to(dtype)
    if gate == "given":
        x["g"] = F.logsigmoid(rn(B, T, HV) + shift)
    elif gate == "kernel":
        x |= {"g": rn(B, T, HV), "A_log": rn(HV) * 0.5, "dt_bias": rn(HV)}
    x["beta"] = rn(B, T, HV) if raw_beta else rn(B, T, HV).sigmoid()
    if initial:
        n = B if sequences is None else sequences
        x["initial_state"] = rn(n, HV, *((V, K) if v_first else (K, V)))
    if read:
        p = x["k"].float() + 0.5 * rn(B, T, H, K) * (1.0 if norm else K**-0.5)
        x["p"] = (p if norm else F.normalize(p, dim=-1)).to(dtype)
    return x


def strain(
    x: dict[str, Tensor], *, h0: float = 1.0, v: float = 1.0, beta: float | None = None, parallel: bool = False,
    length: float | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """``x`` with states and values times a factor, one write strength for all, keys that are nearly one, and keys and
    queries of one length: what float16 has no room for."""
    x = dict(x)
    keys = [n for n in ("k", "p") if n in x]
    dtype = x["k"].dtype
    if parallel:
        x |= {n: 0.02 * x[n].float() + x["k"][:, :1].float() for n in keys}
    if length is not None:
        x |= {n: length * F.normalize(x[n].float(), dim=-1) for n in ("q", *keys)}
    x |= {n: x[n].to(dtype) for n in ("q", *keys)}
    if beta is not None and "beta" in x:
        x["beta"] = torch.full_like(x["beta"], beta)
    x["v"] = (x["v"].float() * v).to(x["v"].dtype)
    if "initial_state" in x:
        x["initial_state"] = x["initial_state"] * h0
    return x


def recurrence(
    x: dict[str, Tensor], *, scale: float | None = None, norm: bool = True, sigmoid: float = 0.0, v_first: bool = False,
    cu: list[int] | None = None, before: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o, final state) in the dtype of ``x``, which should be float64. ``before``: read before the decay."""
    q, k, v, beta = x["q"], x["k"], x["v"], x["beta"]
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    q, k, p = (y.repeat_interleave(HV // H, 2) for y in (q, k, x.get("p", k)))
    if norm:
        q, k, p = (y * torch.rsqrt((y * y).sum(-1, keepdim=True) + 1e-6) for y in (q, k, p))
    q = q * (K**-0.5 if scale is None else scale)
    if sigmoid:
        beta = sigmoid * beta.sigmoid()
    g = x.get("g")
    if g is None:
        g = torch.zeros_like(beta)
    if "A_log" in x:
        g = -x["A_log"].exp() * F.softplus(g + x["dt_bias"])
    spans = [(b, 0, T) for b in range(B)] if cu is None else [(0, a, e) for a, e in itertools.pairwise(cu)]
    o, states = torch.zeros_like(v), []
    outs: list[Tensor] = []
    h0 = x.get("initial_state")
    for i, (b, lo, hi) in enumerate(spans):
        S = v.new_zeros(HV, K, V)
        if h0 is not None:
            S = h0[i].mT if v_first else h0[i]
        for t in range(lo, hi):
            decayed = S * g[b, t].exp()[:, None, None]
            u = beta[b, t][:, None] * (v[b, t] - torch.einsum("hk,hkv->hv", p[b, t], S if before else decayed))
            S = decayed + k[b, t][:, :, None] * u[:, None, :]
            outs.append(torch.einsum("hk,hkv->hv", q[b, t], S))
        states.append(S.mT if v_first else S)
    covered = sum(hi - lo for _, lo, hi in spans)
    if outs:
        flat = torch.stack(outs)
        o = flat.reshape(v.shape) if covered == B * T else torch.cat([flat, o[0, covered:]]).reshape(v.shape)
    return o, torch.stack(states)


def with_gradients(x: dict[str, Tensor], do: Tensor, dht: Tensor | None, **kw) -> dict[str, Tensor]:
    """Outputs "o" and "ht" and the gradient of every input under its own name, all float64."""
    with torch.enable_grad():
        leaves = {n: y.detach().double().requires_grad_() for n, y in x.items()}
        o, ht = recurrence(leaves, **kw)
        loss = (o * do.double()).sum()
        if dht is not None:
            loss = loss + (ht * dht.double()).sum()
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {"o": o.detach(), "ht": ht.detach(), **dict(zip(leaves, grads, strict=True))}


def ratio(ours: Tensor, ref: Tensor) -> float:
    """RMS of the difference over RMS of the reference; inf for NaN."""
    a, b = ours.detach().double(), ref.double()
    if not a.numel():
        return 0.0
    if not torch.isfinite(a).all():
        return float("inf")
    d, size = a - b, b.square().mean().sqrt().item()
    # A gradient that is zero by nature (dg of a first token) has no scale of its own.
    if size < 1e-6 and d.abs().max().item() <= 1e-5:
        return 0.0
    return d.square().mean().sqrt().item() / (size + 1e-8)
