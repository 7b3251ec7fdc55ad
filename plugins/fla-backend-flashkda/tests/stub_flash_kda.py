# SPDX-License-Identifier: MIT
"""A stub of the wheel's call contract, in torch, for machines without the kernels. It is no reference: fla's are.

`flash_kda.fwd(q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state=None, final_state=None,
cu_seqlens=None)` of tokenspeed-flashkda 0.0.1.post20260729: inputs contiguous bfloat16, `A_log [H]` and
`dt_bias [H, K]` float32, states `[N, H, V, K]` bfloat16 or float32,
`cu_seqlens [N + 1]` int64; writes `out` and `final_state`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fla.ops.kda.gate import naive_kda_lowerbound_gate
from fla.ops.kda.naive import naive_recurrent_kda


def fwd(
    q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state=None, final_state=None, cu_seqlens=None
):
    B, T, H, K = q.shape
    for x in (q, k, v, g, out):
        _wants(x, (B, T, H, K), torch.bfloat16)
    _wants(beta, (B, T, H), torch.bfloat16)
    _wants(A_log, (H,), torch.float32)
    _wants(dt_bias, (H, K), torch.float32)
    assert K == 128
    assert type(scale) is float
    assert -5 <= lower_bound <= 0
    bounds = [0, T]
    if cu_seqlens is not None:
        assert B == 1
        _wants(cu_seqlens, (cu_seqlens.numel(),), torch.int64)
        bounds = cu_seqlens.tolist()
    N = B if cu_seqlens is None else len(bounds) - 1
    for state in (initial_state, final_state):
        if state is not None:
            _wants(state, (N, H, K, K), torch.bfloat16, torch.float32)
    decay = naive_kda_lowerbound_gate(g.float(), A_log, dt_bias.flatten(), lower_bound)
    for n in range(N):
        row = n if cu_seqlens is None else 0
        part = slice(*bounds) if cu_seqlens is None else slice(bounds[n], bounds[n + 1])

        def cut(x, row=row, part=part):
            return x[row : row + 1, part].float()

        o, last = naive_recurrent_kda(
            F.normalize(cut(q), dim=-1),
            F.normalize(cut(k), dim=-1),
            cut(v),
            cut(decay),
            cut(beta).sigmoid(),
            scale=scale,
            initial_state=None if initial_state is None else initial_state[n : n + 1].float().mT,
            output_final_state=True,
        )
        out[row, part] = o[0].to(out.dtype)
        if final_state is not None:
            final_state[n] = last[0].mT.to(final_state.dtype)


def _wants(x, shape, *dtypes):
    assert tuple(x.shape) == tuple(shape), f"shape {tuple(x.shape)}, wanted {tuple(shape)}"
    assert x.dtype in dtypes, f"dtype {x.dtype}, wanted one of {dtypes}"
    assert x.is_contiguous(), "not contiguous"
