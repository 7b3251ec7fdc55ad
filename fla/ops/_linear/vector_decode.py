# SPDX-License-Identifier: MIT
"""Launches of the token-by-token kernels with decays per channel: no gradients, one launch a call."""

from __future__ import annotations

import torch
from torch import Tensor

from fla.ops._common.policy import Launch, chip_of, pow2
from fla.ops._common.vector_launch import NamedLauncher
from fla.ops._linear.kernels.vector_decode import slot_recurrent, vector_recurrent

_recurrent, _slots = NamedLauncher(vector_recurrent), NamedLauncher(slot_recurrent)


def decode_launch(K: int, v_first: bool) -> tuple[int, Launch]:
    """Columns of V in a program and its compiler options; the reasons are those of `fla.ops._delta.decode`."""
    if v_first:
        return max(4, min(16, 1024 // pow2(K))), Launch(1)
    return (32, Launch(2)) if K > 64 else (32, Launch(1))


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, *, gk: Tensor | None, gv: Tensor | None, bonus: Tensor | None, scale: float,
    state: Tensor | None, final: bool, reverse: bool, v_first: bool, cu_seqlens: Tensor | None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Outputs and the final state (fp32) of linear attention. All tensors are contiguous."""
    B, T, H, K = k.shape
    V = v.shape[3]
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    o = torch.empty_like(v, dtype=dtype)
    ht = torch.empty((N, H, *((V, K) if v_first else (K, V))), dtype=torch.float32, device=k.device) if final else None
    bv, launch = decode_launch(K, v_first)
    _recurrent(
        -(-V // bv) * H * N,
        (o, q, k, v, gk, gv, bonus, state, ht, cu_seqlens, T, H, scale),
        {
            "K": K, "V": V, "BK": pow2(K), "BV": bv, "KEYS": gk is not None, "VALUES": gv is not None,
            "BONUS": bonus is not None, "INIT": state is not None, "FINAL": final, "REVERSE": reverse,
            "VFIRST": v_first, "VARLEN": cu_seqlens is not None,
        },
        launch.options(chip_of(k.device)),
        (o, q, k, v, gk, gv, bonus, state, ht, cu_seqlens),
    )  # fmt: skip
    return o, ht


def slots(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, g: Tensor, hk: Tensor | None, hv: Tensor | None, scale: float,
    final: bool, reverse: bool, cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Outputs and final states (fp32) of gated slot attention. All tensors are contiguous."""
    B, T, H, K = k.shape
    V, M, group = v.shape[3], s.shape[3], q.shape[2] // k.shape[2]
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    o = torch.empty((*q.shape[:3], V), dtype=q.dtype, device=q.device)
    hkt = torch.empty((N, H, K, M), dtype=torch.float32, device=q.device) if final else None
    hvt = torch.empty((N, H, M, V), dtype=torch.float32, device=q.device) if final else None
    _slots(
        H * N,
        (o, q, k, v, s, g, hk, hv, hkt, hvt, cu_seqlens, T, H, scale),
        {
            "GROUP": group, "K": K, "V": V, "M": M, "BK": pow2(K), "BV": pow2(V), "BM": pow2(M),
            "INITK": hk is not None, "INITV": hv is not None, "FINAL": final, "REVERSE": reverse,
            "VARLEN": cu_seqlens is not None,
        },
        Launch(8).options(chip_of(q.device)),
        (o, q, k, v, s, g, hk, hv, hkt, hvt, cu_seqlens),
    )  # fmt: skip
    return o, hkt, hvt
