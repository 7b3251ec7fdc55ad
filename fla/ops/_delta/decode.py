# SPDX-License-Identifier: MIT
"""Host side of the token-by-token kernel: one launch, no synchronisation, safe under CUDA graph capture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fla.ops._common.checks import check_writable
from fla.ops._common.launch import Launcher, on_device
from fla.ops._common.policy import Launch, chip_of, pow2
from fla.ops._common.tape import KnownCalls, look
from fla.ops._delta.kernels import decode as kernel
from fla.ops._delta.kernels.decode import delta_recurrent

_kernel = Launcher(delta_recurrent)
# Eviction policies of states that are read and written. Reading them to stay until they are written was worth 2 %, to
# go first cost up to 25 %.
STREAM = ("evict_last", "")


@dataclass(frozen=True)
class Gates:
    """How a call's gates are computed; ``lower_bound`` and ``A_log`` as in `fused_recurrent_kda`."""

    in_kernel: bool = False
    vector: bool = False  # the gate is that of gk, not of g
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    lower_bound: float | None = None
    beta_scale: float = 0.0  # 0: beta as it is; else beta_scale * sigmoid(beta)

    def kind(self, given: bool, vector: bool) -> int:
        """What the kernel does with the decay of that kind."""
        if not given:
            return kernel.NO_GATE
        if not self.in_kernel or vector != self.vector:
            return kernel.LOG_DECAY
        return kernel.SOFTPLUS if self.lower_bound is None else kernel.BOUNDED


@dataclass(frozen=True)
class Pool:
    """States in a pool: ``index`` `[N]` or `[N, columns]` slots, ``accepted`` `[N]` or None."""

    index: Tensor
    accepted: Tensor | None


def decode_launch(K: int, v_first: bool) -> tuple[int, Launch]:
    """Columns of V in a program and its compiler options.

    Rows of K lie in one warp, so that no sum over K waits for another. K-first states need 128 bytes of a row at a time
    for whole lines, and two warps to hold as many rows; 128 registers let eight such programs share a multiprocessor.
    """
    if v_first:
        return max(4, min(16, 1024 // pow2(K))), Launch(1)
    if K <= 64:
        return 32, Launch(1)
    return 32, Launch(2, 1, 128 if K <= 128 else None)


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


_calls = KnownCalls()


def _step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, gk: Tensor | None, gv: Tensor | None, beta: Tensor | None,
    A_log: Tensor | None, dt_bias: Tensor | None, state: Tensor | None, read: Tensor | None, erase: Tensor | None,
    gain: Tensor | None, cu: Tensor | None, index: Tensor | None, accepted: Tensor | None, out: Tensor | None,
    flags: tuple[Any, ...],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    in_kernel, vector, lower_bound, beta_scale, scale, norm, v_first, final, in_place, before = flags
    return _recurrent(
        q, k, v, g=g, gk=gk, gv=gv, beta=beta, gates=Gates(in_kernel, vector, A_log, dt_bias, lower_bound, beta_scale),
        scale=scale, state=state, norm=norm, v_first=v_first, cu_seqlens=cu, out=out, final=final, in_place=in_place,
        pool=None if index is None else Pool(index, accepted), read=read, before=before, erase=erase, gain=gain,
    )  # fmt: skip


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor | None = None, gk: Tensor | None = None, gv: Tensor | None = None,
    beta: Tensor | None = None, gates: Gates | None = None, scale: float | None = None, state: Tensor | None = None,
    norm: bool = False, v_first: bool = False, cu_seqlens: Tensor | None = None, out: Tensor | None = None,
    final: bool = False, in_place: bool = False, pool: Pool | None = None, launch: tuple[int, Launch] | None = None,
    read: Tensor | None = None, before: bool = False, erase: Tensor | None = None, gain: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Outputs `[B, T, HV, V]` in v's dtype and the states asked for, as `fused_recurrent_kda_fwd` describes them.

    ``g`` `[B, T, HV]`, ``gk`` `[B, T, HV, K]`, ``gv`` `[B, T, HV, V]`: log decays, which multiply.
    ``read`` `[B, T, H, K]`: the read key, else k; ``before``: the state is read before its decay; ``erase``
    `[B, T, HV, K]` and ``gain`` `[B, T, HV, V]` multiply the read key (not with ``before``) and v. ``launch`` fixes the
    launch, for checks.
    """
    gates = gates or Gates()
    index, accepted = (None, None) if pool is None else (pool.index, pool.accepted)
    inputs = (
        q, k, v, g, gk, gv, beta, gates.A_log, gates.dt_bias, state, read, erase, gain, cu_seqlens, index, accepted,
        out,
    )  # fmt: skip
    seen = look(inputs) if launch is None else None
    if seen is not None:
        flags = (
            gates.in_kernel, gates.vector, gates.lower_bound, gates.beta_scale, scale, norm, v_first, final, in_place,
            before,
        )  # fmt: skip
        known = _calls.get((seen, flags)) or _calls.add((seen, flags), flags)
        with on_device(v):
            found: tuple[Tensor, Tensor | None] = known.run("step", _step, inputs)
        return found
    return _recurrent(
        q, k, v, g=g, gk=gk, gv=gv, beta=beta, gates=gates, scale=scale, state=state, norm=norm, v_first=v_first,
        cu_seqlens=cu_seqlens, out=out, final=final, in_place=in_place, pool=pool, launch=launch, read=read,
        before=before, erase=erase, gain=gain,
    )  # fmt: skip


def _recurrent(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor | None = None, gk: Tensor | None = None, gv: Tensor | None = None,
    beta: Tensor | None = None, gates: Gates | None = None, scale: float | None = None, state: Tensor | None = None,
    norm: bool = False, v_first: bool = False, cu_seqlens: Tensor | None = None, out: Tensor | None = None,
    final: bool = False, in_place: bool = False, pool: Pool | None = None, launch: tuple[int, Launch] | None = None,
    read: Tensor | None = None, before: bool = False, erase: Tensor | None = None, gain: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`recurrent`, step by step."""
    gates = gates or Gates()
    B, T, H, K = k.shape
    HV, V = v.shape[2:]
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    g, gk, gv, beta, A_log, dt_bias = (_dense(x) for x in (g, gk, gv, beta, gates.A_log, gates.dt_bias))
    read, erase, gain, cu_seqlens = (_dense(x) for x in (read, erase, gain, cu_seqlens))
    accepted = None if pool is None else _dense(pool.accepted)
    if out is not None:
        check_writable("out", out)
    if in_place and state is not None:
        check_writable("initial_state", state)
    if out is None:
        # Rows of skipped sequences are zero.
        out = torch.empty_like(v) if pool is None else torch.zeros_like(v)
    target = out if out.is_contiguous() else torch.empty_like(v)
    if target is not out and pool is not None:
        target.copy_(out)
    shape = (V, K) if v_first else (K, V)
    ht: Tensor | None = None
    keep = kernel.KEEP_NONE
    if in_place:
        assert state is not None
        ht, keep = state, kernel.KEEP_FINAL if pool is None else kernel.KEEP_SLOTS
    elif final and pool is None:
        ht, keep = torch.empty((N, HV, *shape), dtype=torch.float32, device=v.device), kernel.KEEP_FINAL
    elif final:
        ht, keep = torch.zeros((B * T, HV, *shape), dtype=torch.float32, device=v.device), kernel.KEEP_TOKENS
    h0 = state
    if state is not None and not state[0:1].is_contiguous():
        # Only the first stride may be anything.
        h0 = state.contiguous()
        ht = h0 if in_place else ht
    if N > 0 and HV > 0 and V > 0:
        chip = chip_of(v.device)
        bv, options = decode_launch(K, v_first) if launch is None else launch
        index = v if pool is None else pool.index
        if pool is not None and pool.index.dim() == 2 and pool.index.shape[1] > 0 and pool.index.stride(1) != 1:
            index = pool.index.contiguous()
        two = pool is not None and index.dim() == 2
        with on_device(v):
            slot = HV * K * V if h0 is None else h0.stride(0)
            last = HV * K * V if ht is None else ht.stride(0)
            unit = 1 if slot % 16 or last % 16 else 16
            args = (
                q, k, v if read is None else read, v, v if g is None else g, v if gk is None else gk,
                v if gv is None else gv, v if beta is None else beta, v if erase is None else erase,
                v if gain is None else gain, v if A_log is None else A_log, v if dt_bias is None else dt_bias,
                v if h0 is None else h0, v if ht is None else ht, target, v if cu_seqlens is None else cu_seqlens,
                index,
                index if accepted is None else accepted, T, H, HV,
                K**-0.5 if scale is None else float(scale), gates.beta_scale,
                0.0 if gates.lower_bound is None else float(gates.lower_bound), index.shape[1] if two else 0,
                0 if h0 is None else h0.shape[0], slot // unit, last // unit, 0 if pool is None else index.stride(0),
            )  # fmt: skip
            meta = {
                "K": K, "V": V, "BK": pow2(K), "BV": bv, "NORM": norm, "GATE": gates.kind(g is not None, False),
                "VGATE": gates.kind(gk is not None, True), "HAS_GV": gv is not None,
                "BETA": 0 if beta is None else beta.dim() - 2, "SIGMOID": gates.beta_scale > 0,
                "HAS_A": gates.in_kernel and A_log is not None, "BIAS": dt_bias is not None, "VFIRST": v_first,
                "VARLEN": cu_seqlens is not None, "HAS_H0": h0 is not None, "POOL": 0 if pool is None else index.dim(),
                "ACCEPTED": accepted is not None, "KEEP": keep,
                "UNIT": unit, "READ": STREAM[0], "WRITE": STREAM[1], "HAS_P": read is not None, "BEFORE": before,
                "HAS_B": erase is not None, "HAS_W": gain is not None,
            }  # fmt: skip
            given = (q, k, v, g, gk, gv, beta, A_log, dt_bias, h0, ht, target, cu_seqlens, index, read, erase, gain)
            _kernel(-(-V // bv) * HV * N, args, meta, options.options(chip), given)
    if target is not out:
        out.copy_(target)
    if in_place:
        assert state is not None
        if h0 is not state:
            state.copy_(h0)  # type: ignore[arg-type]
        ht = state
    return out, ht
