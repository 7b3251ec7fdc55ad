# SPDX-License-Identifier: MIT
"""Linear attention divided by the sum of its weights, on the Triton kernels: host side and autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fla.backends import needs_backward
from fla.ops._common.launch import Launcher, aligned, on_device
from fla.ops._common.policy import pow2
from fla.ops._common.single import once
from fla.ops._common.tape import refuse_transforms
from fla.ops._linear import scalar
from fla.ops._linear.kernels import normalizer as kernel
from fla.ops._linear.policy import DECODE_TOKENS
from fla.ops._linear.scalar import Decays, ScalarCall

EPS = 1e-10  # As in fla.ops.linear_attn.utils.

_sums, _running = Launcher(kernel.key_sums), Launcher(kernel.running_sums)
_denominators, _quotient = Launcher(kernel.denominators), Launcher(kernel.quotient_grad)
_PLAIN = {"num_warps": 4, "num_stages": 1}
_NONE = Decays(None, None)


def sums_before(
    call: ScalarCall, x: Tensor, weight: Tensor | None, start: Tensor | None, end: Tensor, reverse: bool
) -> Tensor:
    """Sums of the rows of ``x`` before (``reverse``: after) each chunk `[chunks * H, K]`; those of all to ``end``."""
    t, bk, chunk = call.table, min(pow2(call.K), 128), call.plan.chunk
    out = torch.empty(call.tiles, call.K, dtype=torch.float32, device=x.device)
    blocks = -(-call.K // bk)
    rest = (call.T, t.per_sequence, call.H)
    meta = {"K": call.K, "BK": bk, "C": chunk}
    _sums(
        call.tiles * blocks,
        (x, x if weight is None else weight, out, x if t.rows is None else t.rows, *rest, call.scale),
        {**meta, "WEIGHT": weight is not None, "VARLEN": t.varlen}, _PLAIN, (x, weight),
    )  # fmt: skip
    cu, offsets, T, NT, H = call.index(x)
    _running(
        t.sequences * call.H * blocks,
        (out, out if start is None else start, end, cu, offsets, T, NT, H, int(start is not None)),
        {**meta, "BT": 32, "REVERSE": reverse, "VARLEN": t.varlen}, _PLAIN, (start, end, t.cu),
    )  # fmt: skip
    return out


def inverses(call: ScalarCall, q: Tensor, k: Tensor, z: Tensor) -> Tensor:
    """One over the denominators `[B, T, H]`, fp32."""
    t = call.table
    out = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    meta = {"K": call.K, "BK": min(pow2(call.K), 64), "C": call.plan.chunk, "VARLEN": t.varlen, "DOT": call.plan.dot}
    args = (q, k, z, out, q if t.rows is None else t.rows, call.T, t.per_sequence, call.H, call.scale, EPS)
    _denominators(call.tiles, args, meta, _PLAIN, (q, k))
    return out


def quotient_grad(call: ScalarCall, do: Tensor, o: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of the numerators in their dtype, of the denominators `[B, T, H]` in fp32)."""
    dr, dden = torch.empty_like(do), torch.empty_like(inverse)
    rows, chunk = inverse.numel(), 32
    meta = {"V": call.V, "BV": min(pow2(call.V), 128), "C": chunk}
    _quotient(-(-rows // chunk), (do, o, inverse, dr, dden, rows), meta, _PLAIN, (do, o))
    return dr, dden


def _forward(
    call: ScalarCall, q: Tensor, k: Tensor, v: Tensor, h0: Tensor | None, z0: Tensor | None, final: bool
) -> tuple[Tensor, ...]:
    zt = torch.empty(call.table.sequences, 1, call.H, call.K, dtype=torch.float32, device=k.device)
    z = sums_before(call, k, None, z0, zt, False)
    inverse = inverses(call, q, k, z)
    entry = scalar.entries(call, k, v, _NONE, h0)
    o, ht = scalar.forward(call, q, k, v, _NONE, h0, entry, final, inverse)
    return o, ht, zt, z, inverse, entry  # type: ignore[return-value]


class NormalizedLinear(torch.autograd.Function):
    """``(o, final state or None, z)``; see `normalized_linear`."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, h0: Tensor | None, z0: Tensor | None, call: ScalarCall, final: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        o, ht, zt, z, inverse, entry = _forward(call, q, k, v, h0, z0, final)
        ctx.save_for_backward(q, k, v, h0, z0, o, z, inverse, entry)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return o, ht, zt

    @staticmethod
    @once
    def backward(
        ctx: Any, do: Tensor | None, dht: Tensor | None = None, dzt: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        q, k, v, h0, z0, o, z, inverse, entry = ctx.saved_tensors
        call: ScalarCall = ctx.call
        do = torch.zeros_like(v) if do is None else aligned(do)
        dht, dzt = (None if x is None else x.contiguous() for x in (dht, dzt))
        with on_device(q):
            dh0 = torch.empty_like(h0) if ctx.needs_input_grad[3] else None
            shape = (call.table.sequences, 1, call.H, call.K)
            dz0 = torch.empty(shape, dtype=torch.float32, device=q.device) if z0 is None else torch.empty_like(z0)
            dr, dden = quotient_grad(call, do, o, inverse)
            x = sums_before(call, q, dden, dzt, dz0, True)
            S, X, dv = scalar.states(call, q, k, v, dr, _NONE, h0, dht, dh0, entry)
            dq, dk, _ = scalar.gradients(call, q, k, v, None, _NONE, dr, S, X, (dden, z, x))
        return dq, dk, dv, dh0, dz0 if ctx.needs_input_grad[4] else None, None, None


def normalized_linear(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, state: Tensor | None = None,
    z: Tensor | None = None, final: bool = False, reverse: bool = False, cu_seqlens: Tensor | None = None,
    tokens: bool = False, **make: Any,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """``o_t = scale q_t S_t / (scale q_t . z_t + 1e-10)``: (o, final state or None, sum of keys), all differentiable.

    q, k `[B, T, H, K]`, v `[B, T, H, V]` of one 16- or 32-bit dtype; ``state`` `[N, H, K, V]` and ``z`` `[N, 1, H, K]`
    any float. ``tokens``: short calls without gradients go token by token. The quotient is formed before o is rounded.
    """
    refuse_transforms((q, k, v, state, z))
    q, k, v = aligned(q), aligned(k), aligned(v)
    state, z = (None if x is None else x.contiguous() for x in (state, z))
    scale = k.shape[-1] ** -0.5 if scale is None else float(scale)
    due = needs_backward((q, k, v, state, z))
    with on_device(q):
        if tokens and k.shape[1] <= DECODE_TOKENS and not due:
            zt = torch.empty(
                k.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1, 1, *k.shape[2:], dtype=torch.float32,
                device=k.device,
            )  # fmt: skip
            o, ht = scalar.recurrent(
                q, k, v, g=None, gamma=None, scale=scale, state=state, final=final, reverse=reverse, v_first=False,
                cu_seqlens=None if cu_seqlens is None else cu_seqlens.contiguous(), z=z, zt=zt, eps=EPS,
            )  # fmt: skip
            return o, ht, zt
        if reverse:
            q, k, v = (x.flip(1) for x in (q, k, v))
            if cu_seqlens is not None:
                cu_seqlens = k.shape[1] - cu_seqlens.flip(0)
                state, z = (None if x is None else x.flip(0) for x in (state, z))
        call = ScalarCall.make(k, v, scale, scalar.NO_DECAY, False, cu_seqlens, **make).on(cu_seqlens)
        if due:
            o, ht, zt = NormalizedLinear.apply(q, k, v, state, z, call, final)
        else:
            o, ht, zt = _forward(call, q, k, v, state, z, final)[:3]
    if reverse:
        o = o.flip(1)
        if cu_seqlens is not None:
            ht, zt = None if ht is None else ht.flip(0), zt.flip(0)
    return o, ht, zt
