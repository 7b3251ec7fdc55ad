# SPDX-License-Identifier: MIT
"""One call of `flash_kda.fwd` with fla's conventions on both sides."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Run FlashKDA's forward.

    Args:
        q, k, v: bfloat16 ``[B, T, H, 128]``.
        g: raw gate, bfloat16 ``[B, T, H, 128]``.
        beta: before the sigmoid, bfloat16 ``[B, T, H]``.
        scale: factor of the outputs; None for ``128 ** -0.5``.
        A_log: ``H`` elements of any shape, or None for 0.
        dt_bias: ``[H * 128]``, ``[H, 128]`` or any shape of as many elements, or None for 0.
        lower_bound: of the gate, in [-5, 0).
        initial_state: ``[N, H, 128, 128]``, key dimension first unless `state_v_first`.
        cu_seqlens: int32 or int64 ``[N + 1]``.

    Returns:
        ``o`` bfloat16 ``[B, T, H, 128]``, and the final states, float32 in the layout asked for, or None.
    """
    B, T, H, D = q.shape
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    # The kernel writes every row that belongs to a sequence. Offsets on the device are nobody's to check here: rows
    # that wrong ones leave out are 0, not whatever was in memory.
    new = torch.empty_like if cu_seqlens is None else torch.zeros_like
    o = new(v, memory_format=torch.contiguous_format)
    state = None if initial_state is None else _fp32(initial_state)
    if state is not None and not state_v_first:
        state = state.transpose(-1, -2)
    final = q.new_empty(N, H, D, D, dtype=torch.float32) if output_final_state else None
    if B * T == 0 or N == 0:
        if final is not None:
            final = final.zero_() if state is None else state.clone(memory_format=torch.contiguous_format)
    else:
        import flash_kda

        with _on(q.device):
            flash_kda.fwd(
                q.contiguous(),
                k.contiguous(),
                v.contiguous(),
                g.contiguous(),
                beta.contiguous(),
                D**-0.5 if scale is None else float(scale),
                o,
                A_log=_parameter(A_log, q, H),
                dt_bias=_parameter(dt_bias, q, H, D),
                lower_bound=float(lower_bound),
                initial_state=None if state is None else state.contiguous(),
                final_state=final,
                cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(torch.int64).contiguous(),
            )
    if final is not None and not state_v_first:
        final = final.transpose(-1, -2).contiguous()
    return o, final


def _fp32(x: Tensor) -> Tensor:
    return x.to(torch.float32)


def _parameter(x: Tensor | None, like: Tensor, *shape: int) -> Tensor:
    return like.new_zeros(shape, dtype=torch.float32) if x is None else _fp32(x).reshape(shape).contiguous()


def _on(device: torch.device) -> AbstractContextManager[object]:
    """The kernel launches on the current device, which need not be that of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
