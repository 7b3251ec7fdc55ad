# SPDX-License-Identifier: MIT
"""The algorithm of the scalar-decay kernels in float32 with operands rounded to 16 bits where the kernels round them.

It says what 16-bit operands cost by themselves: the bound for ill-conditioned inputs, where the recurrence amplifies
rounding. Products are exact to float32 and the inverse is exact, so that a fault of a kernel is not excused.
"""

from __future__ import annotations

import torch
from torch import Tensor

C = 64


def emulate(x: dict[str, Tensor], do: Tensor, dht: Tensor, dtype: torch.dtype, norm: bool = True) -> dict[str, Tensor]:
    """Outputs and gradients of `[1, T, H, D]` inputs, T a multiple of 64, ``g`` given; ``norm``: unit norms are taken
    inside."""
    r = lambda t: t.to(dtype).float()
    q, k, v, d, g, beta = (t[0].float().transpose(0, 1) for t in (*(x[n] for n in "qkv"), do, x["g"], x["beta"]))
    H, T, K = q.shape
    V, N, scale = v.shape[-1], T // C, K**-0.5
    q, k, v, d = map(r, (q, k, v, d))
    cut = lambda t: t.reshape(H, N, C, *t.shape[2:])
    q, k, v, d, g, beta = map(cut, (q, k, v, d, g, beta))
    G = g.cumsum(-1)
    last = G[..., -1:]
    one = torch.ones_like(beta)
    rk = torch.rsqrt((k * k).sum(-1) + 1e-6) if norm else one
    rq = torch.rsqrt((q * q).sum(-1) + 1e-6) * scale if norm else one * scale
    low = torch.ones(C, C, device=q.device).tril(-1).bool()
    dec = (G[..., :, None] - G[..., None, :]).masked_fill(~low, float("-inf")).exp()
    eye = torch.eye(C, device=q.device)
    col = (rk * beta)[..., None, :]
    inv = torch.linalg.inv(eye + k @ k.mT * dec * rk[..., :, None] * col)
    Tm, A = r(inv), r(q @ k.mT * (dec + eye) * rq[..., :, None] * col)
    cq, ck, cu = rq * G.exp(), rk * G.exp(), rk * beta * (last - G).exp()
    eg = last.exp()[..., None]

    S = torch.zeros(H, K, V, device=q.device)
    o, states, us = [], [], []
    for n in range(N):
        Sb = r(S)
        states.append(Sb)
        ks = k[:, n] @ Sb
        u = Tm[:, n] @ v[:, n] + Tm[:, n] @ r(-ck[:, n, :, None] * ks)
        us.append(r(u))
        o.append(cq[:, n, :, None] * (q[:, n] @ Sb) + A[:, n] @ r(u))
        S = eg[:, n] * S + k[:, n].mT @ r(cu[:, n, :, None] * u)
    out = {"o": torch.stack(o, 1), "ht": S[None]}

    X = dht[0].float()
    dv, Xs = [None] * N, [None] * N
    for n in reversed(range(N)):
        Xb = r(X)
        Xs[n] = Xb
        du = A[:, n].mT @ d[:, n] + cu[:, n, :, None] * (k[:, n] @ Xb)
        dr = Tm[:, n].mT @ r(du)
        dv[n] = r(dr)
        X = eg[:, n] * X + q[:, n].mT @ r(cq[:, n, :, None] * d[:, n]) + k[:, n].mT @ r(-ck[:, n, :, None] * dr)
    Sn, Xn, U, D = (torch.stack(t, 1) for t in (states, Xs, us, dv))
    E = r((d @ U.mT) * (dec + eye) * rq[..., :, None] * col)
    F = r(-(D @ U.mT) * dec * rk[..., :, None] * col)
    W = cu[..., None] * (U @ Xn.mT)
    first = (W * k).sum((-1, -2)) + last.exp()[..., 0] * (Sn * Xn).sum((-1, -2))
    W = W + F.mT @ k + E.mT @ q
    aW = (W * k).sum(-1)
    R = -ck[..., None] * (D @ Sn.mT) + F @ k
    aR = (R * k).sum(-1)
    Q = cq[..., None] * (d @ Sn.mT) + E @ k
    aQ = (Q * q).sum(-1)
    dG = (aQ + aR - aW).flip(-1).cumsum(-1).flip(-1) + first[..., None]
    if not norm:
        rk = rq = torch.zeros_like(rk)
    out |= {
        "q": r(Q - q * (rq * rq * aQ / scale**2)[..., None]),
        "k": r(R + W - k * (rk * rk * (aR + aW))[..., None]), "v": D,
        "g": dG, "beta": aW / beta,
    }  # fmt: skip
    back = lambda t: t.reshape(H, T, *t.shape[3:]).transpose(0, 1)[None]
    return {n: t if n == "ht" else back(t) for n, t in out.items()}
