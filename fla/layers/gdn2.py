# SPDX-License-Identifier: MIT
"""Gated DeltaNet 2: separate gates for what a delta rule erases and for what it writes."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from fla.layers._delta import DeltaLayer
from fla.layers._recurrent import Call, reset_decay_gate
from fla.ops.gdn2 import chunk_gdn2, fused_recurrent_gdn2

__all__ = ["GatedDeltaNet2"]


class GatedDeltaNet2(DeltaLayer):
    """A delta rule that decays and erases by key channel and writes by value channel.

    With `q`, `k`, `v` after short convolutions, `q` and `k` normalised, the erase gate ``b = sigmoid(b_proj(x))``, the
    write gate ``w = sigmoid(w_proj(x))`` and the decay ``g = -exp(A_log) * softplus(f_proj(x) + dt_bias)``, each value
    head keeps ``S <- diag(exp(g)) S``, ``S <- S + k (w * v - S^T (b * k))^T`` and puts out ``S^T q / sqrt(K)``, which
    is normalised, gated and projected. Decay and erase gate belong to key heads, the write gate to value heads.

    Args:
        hidden_size: width `D`.
        expand_v: value channels of a head over its key channels.
        head_dim: key channels `K` of a head.
        num_heads: query and key heads `H`.
        num_v_heads: value heads `HV`, a multiple of `H`; `H` when None.
        mode: ``"chunk"`` or ``"fused_recurrent"``, the kernel of long inputs without autograd.
        use_short_conv: convolve `q`, `k`, `v`; otherwise they get SiLU alone.
        allow_neg_eigval: ``b`` in (0, 2) instead of (0, 1).
        conv_size: taps of the convolutions.
        conv_bias: learn their bias.
        layer_idx: place in a cache.
        norm_eps: epsilon of the output norm.

    Raises:
        ArgumentError: heads that do not divide, a fractional head, another mode.
    """

    undecayed: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias")

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1.0,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.set_head_dim(head_dim, expand_v, hidden_size, num_heads, num_v_heads, mode=mode, layer_idx=layer_idx)
        self.allow_neg_eigval = allow_neg_eigval
        self.add_projections(use_short_conv, conv_size, conv_bias)
        self.f_proj = self.low_rank(self.key_dim)
        self.b_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.w_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
        self.add_decay(num_heads, head_dim)
        self.add_output(self.low_rank(self.value_dim, bias=True), "sigmoid", norm_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the decay; the projections initialise themselves."""
        reset_decay_gate(self.A_log, self.dt_bias, low=1)

    def rule(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Any]:
        """See :meth:`DeltaLayer.rule`. The state is ``[N, HV, K, V]`` float32."""
        group = self.num_v_heads // self.num_heads

        def per_value_head(t: Tensor, dim: int) -> Tensor:
            return t if group == 1 else t.repeat_interleave(group, dim)

        b = call.linear(self.b_proj, x).sigmoid() * (2 if self.allow_neg_eigval else 1)
        g, b = (per_value_head(t.unflatten(-1, (self.num_heads, -1)), -2) for t in (call.linear(self.f_proj, x), b))
        w = call.linear(self.w_proj, x).sigmoid().unflatten(-1, (self.num_v_heads, -1))
        dt_bias = per_value_head(self.dt_bias.unflatten(0, (self.num_heads, -1)), 0).flatten()
        gate = {"A_log": per_value_head(self.A_log, 0), "dt_bias": dt_bias, "use_gate_in_kernel": True}
        kernel = call.pick(chunk_gdn2, fused_recurrent_gdn2)
        return kernel(q, k, v, g=g, b=b, w=w, use_qk_l2norm_in_kernel=True, **gate, **call.host_options)[:2]
