# SPDX-License-Identifier: MIT
"""KDA and GDN-2 token by token in float64, and inputs for their checks: shared by the tests and the device checks."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Inputs = dict[str, Tensor]


def make_inputs(
    B: int = 1,
    T: int = 70,
    H: int = 1,
    HV: int | None = None,
    K: int = 16,
    V: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    g_dtype: torch.dtype | None = None,
    gate: str = "ready",
    A: bool = True,
    bias: bool = True,
    raw_beta: bool = False,
    normed: bool = False,
    sequences: int | None = None,
    v_first: bool = False,
    channels: bool = False,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> Inputs:
    """Tensors of a call. ``gate``: "ready" (log decays in [-5, 0]), "bound", "weak", "extreme" (-1000 too), "mixed" (of
    these kinds in turn, and just below the bound; two heads or more), "raw" or "raw mixed" (one head strong).

    ``normed``: keys have length 1 already. ``sequences``: initial states for so many sequences. ``channels``: erase and
    write gates ``b`` and ``w`` per channel, as GDN-2 has, instead of ``beta``.
    """
    gen = torch.Generator(device=device).manual_seed(seed)
    rand = lambda *s: torch.randn(*s, generator=gen, device=device)
    HV, V = HV or H, V or K
    q, k, v, g, beta = rand(B, T, H, K), rand(B, T, H, K), rand(B, T, HV, V), rand(B, T, HV, K), rand(B, T, HV)
    if normed:
        k = F.normalize(k, dim=-1)
    if gate == "ready":
        g = F.logsigmoid(g * 2).clamp_min(-5)
    elif gate == "bound":
        g = torch.full_like(g, -5.0)
    elif gate == "weak":
        g = -1e-3 * torch.rand(g.shape, generator=gen, device=device)
    elif gate == "extreme":
        hard = torch.rand(g.shape, generator=gen, device=device) < 0.3
        g = torch.where(hard, torch.full_like(g, -1000.0), F.logsigmoid(g * 2))
    elif gate == "mixed":
        hard = torch.rand(g.shape, generator=gen, device=device) < 0.3
        hard[:, : T // 4], hard[:, T // 2 :], hard[:, :, 1:] = False, False, False
        g = torch.where(hard, torch.full_like(g, -1000.0), F.logsigmoid(g * 2).clamp_min(-5))
        # Chunks of 32 tokens are told apart at 231 bits, 5.0037 a token.
        g[:, : T // 2, 1], g[:, T // 2 :, 1] = -5.0, -5.03125
    else:
        g = g * 2 - 1
    if not raw_beta:
        beta = beta.sigmoid()
        beta[:, ::8] = 0
    x = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype), "g": g.to(g_dtype or dtype), "beta": beta.to(dtype)}
    if gate[:3] == "raw" and A:
        x["A_log"] = rand(HV) * 0.3
        if gate == "raw mixed":
            x["A_log"][0] = 4.0
    if gate[:3] == "raw" and bias:
        x["dt_bias"] = rand(HV * K) * 0.5
    if sequences is not None:
        x["initial_state"] = rand(sequences, HV, *((V, K) if v_first else (K, V)))
    if channels:
        del x["beta"]
        x["b"], x["w"] = rand(B, T, HV, K).sigmoid().to(dtype), rand(B, T, HV, V).sigmoid().to(dtype)
        x["b"][:, ::8] = 0
    return x


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    *,
    b: Tensor | None = None,
    w: Tensor | None = None,
    scale: float | None = None,
    norm: bool = True,
    raw: bool = False,
    lower: float | None = None,
    sigmoid: float = 0.0,
    v_first: bool = False,
    cu: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs and final states. ``raw``: ``g`` goes through the gate; ``sigmoid`` 0: beta as given, else its factor;
    ``b`` and ``w`` in place of beta."""
    B, T, H, K = q.shape
    HV = v.shape[2]
    if norm:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q.repeat_interleave(HV // H, 2) * (K**-0.5 if scale is None else scale)
    k = k.repeat_interleave(HV // H, 2)
    if raw:
        z = g if dt_bias is None else g + dt_bias.view(HV, K)
        rate: Any = 1.0 if A_log is None else A_log.view(HV, 1).exp()
        g = -rate * F.softplus(z) if lower is None else lower * torch.sigmoid(rate * z)
    if sigmoid and beta is not None:
        beta = sigmoid * torch.sigmoid(beta)
    erase = beta[..., None] if b is None else b
    gain = beta[..., None] if w is None else w
    parts = [(slice(None), 0, T)] if cu is None else [(slice(0, 1), a, b) for a, b in itertools.pairwise(cu)]
    decay, outs, finals = g.exp(), [], []
    for n, (row, start, stop) in enumerate(parts):
        if initial_state is None:
            S = v.new_zeros(B if cu is None else 1, HV, K, v.shape[3])
        else:
            S = initial_state if cu is None else initial_state[n : n + 1]
            S = S.mT if v_first else S
        o = [v.new_zeros(S.shape[0], 0, HV, v.shape[3])]
        for t in range(start, stop):
            S = S * decay[row, t][..., None]
            read = erase[row, t] * k[row, t]
            u = gain[row, t] * v[row, t] - (read[..., None, :] @ S)[..., 0, :]
            S = S + k[row, t][..., None] * u[..., None, :]
            o.append(q[row, t][..., None, :] @ S)
            o[-1] = o[-1].transpose(1, 2)
        outs.append(torch.cat(o, 1))
        finals.append(S.mT if v_first else S)
    return torch.cat(outs, 1), torch.cat(finals)


def with_gradients(x: Inputs, do: Tensor, dht: Tensor, **settings: Any) -> Inputs:
    """Outputs, final states and the gradients of all inputs, in float64."""
    y = {n: t.detach().double().requires_grad_() for n, t in x.items()}
    o, ht = recurrence(**y, **settings)
    grads = torch.autograd.grad((o * do.double()).sum() + (ht * dht.double()).sum(), list(y.values()))
    return {"o": o.detach(), "ht": ht.detach(), **dict(zip(y, grads, strict=True))}


def ratio(got: Tensor, want: Tensor) -> float:
    """RMS of the difference over RMS; infinite for NaN. Positions where the reference is not finite do not count."""
    a, b = got.detach().double(), want.detach().double()
    ok = torch.isfinite(b)
    a, b = a[ok], b[ok]
    e = float((a - b).square().mean().sqrt() / (b.square().mean().sqrt() + 1e-12)) if a.numel() else 0.0
    return e if e == e else float("inf")
