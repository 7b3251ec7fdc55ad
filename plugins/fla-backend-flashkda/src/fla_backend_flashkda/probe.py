# SPDX-License-Identifier: MIT
"""The one-time probe: a tiny forward compared with fla's token recurrence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

TOLERANCE = 0.02  # RMS ratio; far above bf16 rounding, far below any real defect
HEADS, DIM, LENGTHS, BOUND = 2, 128, (37, 20), -5.0


def probe(chunk_kda: Callable[..., Any]) -> tuple[bool, str | None]:
    """Whether the kernels work on the current CUDA device, and why not."""
    if not torch.cuda.is_available():
        return False, "no CUDA device"
    if torch.cuda.is_current_stream_capturing():
        # The comparison waits for the device, which would break the capture; no answer is no permission.
        return False, (
            "its first call came under CUDA graph capture, where it cannot be tried out; call the op once before, "
            "or fla.backends.refresh() after"
        )
    return check(chunk_kda, torch.device("cuda", torch.cuda.current_device()))


def check(chunk_kda: Callable[..., Any], device: torch.device) -> tuple[bool, str | None]:
    """One packed call with an initial state on `device`; ``(False, reason)`` when it raises or is wrong."""
    from fla.ops.kda.gate import naive_kda_lowerbound_gate
    from fla.ops.kda.naive import naive_recurrent_kda

    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        generator = torch.Generator(device=device).manual_seed(0)

        def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.randn(*shape, device=device, dtype=torch.float32, generator=generator).to(dtype)

        total = sum(LENGTHS)
        q, k, v, g = (draw(1, total, HEADS, DIM, dtype=torch.bfloat16) for _ in range(4))
        beta = draw(1, total, HEADS, dtype=torch.bfloat16)
        A_log, dt_bias = draw(HEADS) * 0.1, draw(HEADS, DIM) * 0.1
        state = draw(len(LENGTHS), HEADS, DIM, DIM)
        cu_seqlens = torch.tensor([0, LENGTHS[0], total], device=device)
        try:
            o, final = chunk_kda(
                q,
                k,
                v,
                g,
                beta,
                initial_state=state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True,
                lower_bound=BOUND,
                cu_seqlens=cu_seqlens,
                A_log=A_log,
                dt_bias=dt_bias,
            )
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as error:
            return False, f"a call of flash_kda.fwd failed ({type(error).__name__}: {str(error).strip()})"
        decay = naive_kda_lowerbound_gate(g.float(), A_log, dt_bias.flatten(), BOUND)
        start = 0
        for n, length in enumerate(LENGTHS):
            rows = slice(start, start + length)
            start += length
            want_o, want_state = naive_recurrent_kda(
                F.normalize(q[:, rows].float(), dim=-1),
                F.normalize(k[:, rows].float(), dim=-1),
                v[:, rows].float(),
                decay[:, rows],
                beta[:, rows].float().sigmoid(),
                initial_state=state[n : n + 1],
                output_final_state=True,
            )
            for name, got, want in (("outputs", o[:, rows], want_o), ("final states", final[n : n + 1], want_state)):
                assert want is not None
                ratio = ((got.float() - want).norm() / want.norm()).item()
                if not ratio < TOLERANCE:  # catches NaN too
                    return False, f"flash_kda.fwd returned wrong {name} (RMS ratio {ratio:.3g})"
    return True, None
