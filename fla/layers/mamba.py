# SPDX-License-Identifier: MIT
"""Mamba (https://arxiv.org/abs/2312.00752). Its scan is an elementwise recurrence of channels times states."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fla.layers._recurrent import Call, Mixed, RecurrentLayer, reset_dt_bias
from fla.modules._dtype import upcast
from fla.modules.activations import ACT2FN
from fla.modules.causal_conv1d import ShortConvolution
from fla.ops._common.checks import check_choice
from fla.ops.hgrn import chunk_hgrn, fused_recurrent_hgrn

__all__ = ["Mamba"]

SLICE = 1 << 26
"""Elements ``B * T * I * N`` of the recurrence at a time; more are scanned in slices that the backward recomputes."""


def _scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None, kernel: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """``h <- exp(dt A) h + dt B x`` and ``y = C h`` for some channels: ``[B, T, I]`` and the states ``[N, I * N]``."""
    drive = ((dt * x)[..., None] * B[:, :, None]).flatten(-2)
    h, state = kernel(drive, (dt[..., None] * A).flatten(-2), initial_state=state, **options)
    return (h.unflatten(-1, A.shape) * C[:, :, None]).sum(-1), state


class Mamba(RecurrentLayer):
    """A selective state space of ``state_size`` states for each channel.

    With `x` after the convolution and ``dt = softplus(dt_proj(.))``, `B`, `C` from ``x_proj(x)``, every channel keeps
    ``h <- exp(-exp(A_log) dt) h + dt B x`` and puts out ``C h + D x``, gated by ``silu(z)``.
    ``in_proj`` makes `x` and `z`.

    Args:
        hidden_size: width.
        state_size: states `N` of a channel.
        conv_kernel: taps of the convolution.
        use_conv_bias: learn its bias.
        intermediate_size: channels `I`.
        dt_rank: width of the input of ``dt_proj``; ``"auto"`` for a sixteenth of the width, rounded up.
        dt_min, dt_max, dt_init_floor: the step starts log-uniform between the first two, not below the third.
        dt_init, dt_scale: ``dt_proj`` starts ``"random"``, uniform within ``dt_scale / sqrt(dt_rank)``, or
            ``"constant"`` at that bound.
        use_bias: learn a bias in ``in_proj`` and ``out_proj``.
        hidden_act: activation of the convolution.
        layer_idx: place in a cache.
        backend: accepted as in the reference package; nothing else has to be installed here.

    Raises:
        ArgumentError: another activation or start of the step.
    """

    undecayed: ClassVar[tuple[str, ...]] = ("A_log", "D")
    any_mode_trains: ClassVar[bool] = True

    def __init__(
        self,
        hidden_size: int = 2048,
        state_size: int = 16,
        conv_kernel: int = 4,
        use_conv_bias: bool = True,
        intermediate_size: int = 2048,
        dt_rank: int | str = "auto",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init: str = "random",
        dt_scale: float = 1.0,
        dt_init_floor: float = 1e-4,
        use_bias: bool = False,
        hidden_act: str = "silu",
        layer_idx: int | None = None,
        backend: str = "cuda",
    ) -> None:
        super().__init__()
        check_choice("hidden_act", hidden_act, ACT2FN)
        check_choice("dt_init", dt_init, ("random", "constant"))
        self.mode, self.layer_idx = "chunk", layer_idx
        self.hidden_size, self.intermediate_size, self.ssm_state_size = hidden_size, intermediate_size, state_size
        self.conv_kernel_size, self.use_conv_bias, self.use_bias = conv_kernel, use_conv_bias, use_bias
        self.time_step_rank = math.ceil(hidden_size / 16) if dt_rank == "auto" else int(dt_rank)
        self.dt_range, self.dt_init_floor = (dt_min, dt_max), dt_init_floor
        self.dt_init, self.dt_scale = dt_init, dt_scale
        silu = hidden_act in ("silu", "swish")
        self.act = None if silu else ACT2FN[hidden_act]
        self.conv1d = ShortConvolution(intermediate_size, conv_kernel, use_conv_bias, "silu" if silu else None)
        self.in_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias=use_bias)
        self.x_proj = nn.Linear(intermediate_size, self.time_step_rank + 2 * state_size, bias=False)
        self.dt_proj = nn.Linear(self.time_step_rank, intermediate_size)
        self.A_log = nn.Parameter(torch.empty(intermediate_size, state_size, dtype=torch.float32))
        self.D = nn.Parameter(torch.empty(intermediate_size, dtype=torch.float32))
        self.out_proj = nn.Linear(intermediate_size, hidden_size, bias=use_bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise decay, steps and `D`; the rest initialises itself."""
        if not getattr(self.A_log, "_is_hf_initialized", False):
            with torch.no_grad():  # 1 to N, by operations that sharded parameters have too
                self.A_log.copy_(torch.ones_like(self.A_log).cumsum(-1).log())
        nn.init.ones_(self.D)
        bound = self.dt_scale * self.time_step_rank**-0.5
        nn.init.uniform_(self.dt_proj.weight, -bound if self.dt_init == "random" else bound, bound)
        reset_dt_bias(self.dt_proj.bias, self.dt_range, self.dt_init_floor)

    def mix(self, x: Tensor, call: Call) -> Mixed:
        """See :meth:`RecurrentLayer.mix`; the states are ``[N, I, state_size]`` float32 and ``[N, I, W]``."""
        x, gate = self.in_proj(x).chunk(2, -1)
        x, conv_state = call.convolve(self.conv1d, x, call.state.get("conv_state"))
        if self.act is not None:
            x = self.act(x)
        dt, B, C = self.x_proj(x).split((self.time_step_rank, self.ssm_state_size, self.ssm_state_size), -1)
        dt, B, C = F.softplus(upcast(self.dt_proj(dt))), upcast(B), upcast(C)
        y, recurrent_state = self._scan(
            upcast(x),
            dt,
            B,
            C,
            call.state.get("recurrent_state"),
            kernel=call.pick(chunk_hgrn, fused_recurrent_hgrn),
            output_final_state=call.keep_state,
            cu_seqlens=call.cu_seqlens,
        )
        y = (y + upcast(x) * upcast(self.D)).to(x.dtype)
        return Mixed(self.out_proj(y * F.silu(gate)), recurrent_state, conv_state)

    def _scan(
        self, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, state: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        A = -upcast(self.A_log).exp()
        I, N = A.shape
        width = min(I, max(1, SLICE // (max(1, dt.shape[0] * dt.shape[1]) * N)))
        outputs: list[Tensor] = []
        states: list[Tensor] = []
        for i in range(0, I, width):
            part = slice(i, i + width)
            start = None if state is None else state[:, part].flatten(1)
            inputs = x[..., part], dt[..., part], A[part], B, C, start
            if width < I and torch.is_grad_enabled():
                y, last = checkpoint(_scan, *inputs, use_reentrant=False, **options)
            else:
                y, last = _scan(*inputs, **options)
            outputs.append(y)
            if last is not None:
                states.append(last.unflatten(-1, (-1, N)))
        return torch.cat(outputs, -1), torch.cat(states, 1) if states else None
