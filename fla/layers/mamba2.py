# SPDX-License-Identifier: MIT
"""Mamba-2 (https://arxiv.org/abs/2405.21060). Its scan is linear attention with one decay for each head."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fla.layers._recurrent import Call, Mixed, RecurrentLayer, reset_decay_gate, whole
from fla.modules._dtype import upcast
from fla.modules.activations import ACT2FN
from fla.modules.causal_conv1d import ShortConvolution
from fla.modules.norm import RMSNormGated
from fla.ops._common.checks import ArgumentError, check_choice
from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

__all__ = ["Mamba2"]


class Mamba2(RecurrentLayer):
    """A selective state space: one convolution, a recurrence per head, a gated norm.

    With `x`, `B`, `C` after the convolution and the step ``dt = softplus(. + dt_bias)``, a head keeps
    ``S <- exp(-exp(A_log) dt) S + dt B x^T`` and puts out ``S^T C + D x``. ``in_proj`` makes the gate, `x`, `B`, `C`
    and `dt`, in that order.

    Args:
        num_heads: heads; ``expand * hidden_size / head_dim`` when None, and it may be nothing else.
        head_dim: channels `P` of a head.
        hidden_size: width.
        state_size: channels `N` of `B` and `C`.
        expand: channels of all heads over the width.
        n_groups: groups of heads that share `B` and `C`.
        conv_kernel: taps of the convolution.
        conv_init: its weights start uniform in ``[-conv_init, conv_init]``; None for the usual start.
        use_conv_bias: learn its bias.
        hidden_act: its activation, one of :data:`fla.modules.activations.ACT2FN`.
        A_init_range: ``exp(A_log)`` starts uniform in it.
        D_has_hdim: learn `D` for every channel instead of every head.
        rmsnorm: normalise each group of channels beside the gate.
        norm_before_gate: norm first, gate second.
        dt_min, dt_max, dt_init_floor: the step starts log-uniform between the first two, not below the third.
        dt_limit: the step is clamped to this range.
        use_bias: learn a bias in both projections.
        norm_eps: epsilon of the norm.
        chunk_size: accepted; results do not depend on it.
        layer_idx: place in a cache.
        backend: accepted as in the reference package, which calls ``mamba_ssm`` for ``"cuda"``; not needed here.

    Raises:
        ArgumentError: sizes that do not fit, another activation.
    """

    undecayed: ClassVar[tuple[str, ...]] = ("A_log", "D", "dt_bias")

    def __init__(
        self,
        num_heads: int | None = None,
        head_dim: int = 64,
        hidden_size: int = 2048,
        state_size: int = 128,
        expand: int = 2,
        n_groups: int = 1,
        conv_kernel: int = 4,
        conv_init: float | None = None,
        use_conv_bias: bool = True,
        hidden_act: str = "silu",
        A_init_range: tuple[float, float] = (1, 16),
        D_has_hdim: bool = False,
        rmsnorm: bool = True,
        norm_before_gate: bool = False,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        use_bias: bool = False,
        norm_eps: float = 1e-5,
        chunk_size: int = 256,
        layer_idx: int | None = None,
        backend: str = "cuda",
    ) -> None:
        super().__init__()
        width = whole("expand * hidden_size", expand * hidden_size)
        heads = whole("expand * hidden_size / head_dim", width / head_dim)
        if num_heads not in (None, heads):
            raise ArgumentError(f"`num_heads` must be expand * hidden_size / head_dim = {heads}, got {num_heads}.")
        if n_groups < 1 or heads % n_groups:
            raise ArgumentError(f"`n_groups` must divide the {heads} heads, got {n_groups}.")
        check_choice("hidden_act", hidden_act, ACT2FN)
        self.mode = "chunk"
        self.hidden_size, self.intermediate_size, self.expand = hidden_size, width, expand
        self.num_heads, self.head_dim, self.n_groups, self.state_size = heads, head_dim, n_groups, state_size
        self.conv_kernel_size, self.conv_init = conv_kernel, conv_init
        self.A_init_range, self.dt_limit = A_init_range, tuple(dt_limit)
        self.dt_range, self.dt_init_floor = (dt_min, dt_max), dt_init_floor
        self.rmsnorm, self.norm_before_gate, self.layer_idx = rmsnorm, norm_before_gate, layer_idx
        self.conv_dim = width + 2 * n_groups * state_size
        silu = hidden_act in ("silu", "swish")
        self.act = None if silu else ACT2FN[hidden_act]
        self.conv1d = ShortConvolution(self.conv_dim, conv_kernel, use_conv_bias, "silu" if silu else None)
        self.in_proj = nn.Linear(hidden_size, width + self.conv_dim + heads, bias=use_bias)
        self.dt_bias = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.A_log = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.D = nn.Parameter(torch.empty(width if D_has_hdim else heads, dtype=torch.float32))
        if rmsnorm:
            self.norm = RMSNormGated(width, norm_eps, width // n_groups, norm_before_gate)
        self.out_proj = nn.Linear(width, hidden_size, bias=use_bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise decay, steps, `D` and, with ``conv_init``, the convolution; the rest initialises itself."""
        low, high = self.A_init_range
        reset_decay_gate(self.A_log, self.dt_bias, low, high, self.dt_range, self.dt_init_floor)
        nn.init.ones_(self.D)
        if self.conv_init is not None:
            nn.init.uniform_(self.conv1d.weight, -self.conv_init, self.conv_init)

    def mix(self, x: Tensor, call: Call) -> Mixed:
        """See :meth:`RecurrentLayer.mix`; the states are ``[N, H, P, N]`` float32 and ``[N, conv_dim, W]``."""
        H, groups = self.num_heads, self.n_groups * self.state_size
        gate, xBC, dt = self.in_proj(x).split((self.intermediate_size, self.conv_dim, H), -1)
        xBC, conv_state = call.convolve(self.conv1d, xBC, call.state.get("conv_state"))
        if self.act is not None:
            xBC = self.act(xBC)
        x, B, C = xBC.split((self.intermediate_size, groups, groups), -1)
        x = upcast(x.unflatten(-1, (H, self.head_dim)))
        B, C = (
            t.unflatten(-1, (self.n_groups, self.state_size)).repeat_interleave(H // self.n_groups, 2) for t in (B, C)
        )
        dt = F.softplus(upcast(dt) + upcast(self.dt_bias))
        if self.dt_limit != (0.0, float("inf")):
            dt = dt.clamp(*self.dt_limit)
        v, g = (x * dt[..., None]).to(xBC.dtype), -upcast(self.A_log).exp() * dt
        kernel = call.pick(chunk_simple_gla, fused_recurrent_simple_gla)
        o, recurrent_state = kernel(C, B, v, g=g, scale=1.0, state_v_first=True, **call.host_options)
        y = (o + x * upcast(self.D).view(H, -1)).to(xBC.dtype).flatten(-2)
        y = self.norm(y, gate) if self.rmsnorm else y * F.silu(gate)
        return Mixed(self.out_proj(y), recurrent_state, conv_state)
