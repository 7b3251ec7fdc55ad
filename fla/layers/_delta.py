# SPDX-License-Identifier: MIT
"""What the layers of the delta rule share: heads, projections, output stage."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from fla.layers._recurrent import Call, Mixed, RecurrentLayer, whole
from fla.modules.norm import FusedRMSNormGated, RMSNorm
from fla.ops._common.checks import ArgumentError

__all__ = ["IN_KERNEL", "DeltaLayer"]

IN_KERNEL = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "state_v_first": True,
}
"""Options of kernels that take projections as they are."""


class DeltaLayer(RecurrentLayer):
    """Heads of ``q``, ``k``, ``v`` after short convolutions, and a norm, gate and projection of what they put out.

    Attributes:
        num_heads: query and key heads `H`.
        num_v_heads: value heads `HV`, a multiple of `H`; value head `i` uses query head ``i // (HV / H)``.
        head_k_dim: key channels `K` of a head.
        head_v_dim: value channels `V` of a head.
        use_short_conv: convolve `q`, `k`, `v`; otherwise they get SiLU alone.
    """

    def set_heads(
        self,
        hidden_size: int,
        num_heads: int,
        num_v_heads: int | None,
        head_k_dim: int,
        head_v_dim: int,
        *,
        mode: str,
        layer_idx: int | None,
    ) -> None:
        """Check and set the sizes; ``num_v_heads=None`` means ``num_heads``."""
        if num_v_heads is None:
            num_v_heads = num_heads
        if num_heads < 1 or num_v_heads < 1 or num_v_heads % num_heads:
            raise ArgumentError(f"`num_v_heads` must be a multiple of num_heads = {num_heads}, got {num_v_heads}.")
        self.mode = self.check_mode(mode)
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.num_v_heads = num_v_heads
        self.head_k_dim = head_k_dim
        self.head_v_dim = head_v_dim
        self.key_dim = num_heads * head_k_dim
        self.value_dim = num_v_heads * head_v_dim
        self.layer_idx = layer_idx

    def set_head_dim(self, head_dim: int, expand_v: float, D: int, H: int, HV: int | None, **rest: Any) -> None:
        """:meth:`set_heads` for layers that have ``head_dim`` key channels and ``expand_v`` times as many of values."""
        self.head_dim, self.expand_v = head_dim, expand_v
        self.set_heads(D, H, HV, head_dim, whole("head_dim * expand_v", head_dim * expand_v), **rest)

    def add_projections(self, use_short_conv: bool, conv_size: int, conv_bias: bool, qk_silu: bool = True) -> None:
        """Register the projections of `q`, `k`, `v` and, where wanted, their convolutions."""
        self.use_short_conv, self.conv_size, self.conv_bias = use_short_conv, conv_size, conv_bias
        self.q_proj = nn.Linear(self.hidden_size, self.key_dim, bias=False)
        self.k_proj = nn.Linear(self.hidden_size, self.key_dim, bias=False)
        self.v_proj = nn.Linear(self.hidden_size, self.value_dim, bias=False)
        if use_short_conv:
            self.add_short_convs(conv_size, conv_bias, "silu" if qk_silu else None, q=self.key_dim, k=self.key_dim)
            self.add_short_convs(conv_size, conv_bias, v=self.value_dim)
        else:
            warnings.warn(
                f"{type(self).__name__} without short convolutions trains worse; keep use_short_conv=True.",
                stacklevel=3,
            )

    def add_decay(self, heads: int, channels: int) -> None:
        """Register ``A_log`` and ``dt_bias`` of a decay ``-exp(A_log) * softplus(x + dt_bias)``.

        ``dt_bias`` has ``channels`` values for each of the ``heads``. Both are float32 whatever the default dtype is.
        """
        self.A_log = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(heads * channels, dtype=torch.float32))

    def low_rank(self, width: int, bias: bool = False) -> nn.Sequential:
        """A projection to ``width`` channels through as many as a head has of values."""
        return nn.Sequential(
            nn.Linear(self.hidden_size, self.head_v_dim, bias=False), nn.Linear(self.head_v_dim, width, bias=bias)
        )

    def add_output(self, gate: nn.Module | None, activation: str, norm_eps: float) -> None:
        """Register the norm and the projection of the output, and ``gate`` as ``g_proj`` unless it is None."""
        self.o_norm: nn.Module
        if gate is not None:
            self.g_proj = gate
            self.o_norm = FusedRMSNormGated(self.head_v_dim, eps=norm_eps, activation=activation)
        else:
            self.o_norm = RMSNorm(self.head_v_dim, eps=norm_eps, dtype=torch.float32)
        self.o_proj = nn.Linear(self.value_dim, self.hidden_size, bias=False)

    def rule(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Any]:
        """The layer's recurrence: gates from ``x``, then the kernel.

        Returns:
            Outputs ``[B, T, HV, V]`` and the final states, or None.
        """
        raise NotImplementedError

    def mix(self, x: Tensor, call: Call) -> Mixed:
        """See :meth:`RecurrentLayer.mix`."""
        (q, k, v), conv_state = self.project(x, "qkv", call)
        q, k = (t.unflatten(-1, (self.num_heads, self.head_k_dim)) for t in (q, k))
        v = v.unflatten(-1, (self.num_v_heads, self.head_v_dim))
        o, recurrent_state = self.rule(x, q, k, v, call)
        if hasattr(self, "g_proj"):
            o = self.o_norm(o, call.linear(self.g_proj, x).unflatten(-1, (self.num_v_heads, self.head_v_dim)))
        else:
            o = self.o_norm(o)
        return Mixed(self.o_proj(o.flatten(-2)), recurrent_state, conv_state)
