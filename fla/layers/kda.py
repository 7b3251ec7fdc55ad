# SPDX-License-Identifier: MIT
"""Kimi Delta Attention (Kimi Linear, https://arxiv.org/abs/2510.26692)."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from fla.layers._delta import IN_KERNEL, DeltaLayer
from fla.layers._recurrent import Call, reset_decay_gate
from fla.ops._common.checks import ArgumentError
from fla.ops.kda import chunk_kda, fused_recurrent_kda

__all__ = ["KimiDeltaAttention"]


class KimiDeltaAttention(DeltaLayer):
    """A delta rule whose state decays by its own factor in every key channel.

    With `q`, `k`, `v` after short convolutions, `q` and `k` normalised, ``beta = sigmoid(b_proj(x))`` and the decay
    ``g = -exp(A_log) * softplus(f_proj(x) + dt_bias)``, each head keeps ``S <- diag(exp(g)) S``,
    ``S <- S + beta k (v - S^T k)^T`` and puts out ``S^T q / sqrt(K)``, which is normalised, gated and projected.

    Args:
        hidden_size: width `D`.
        expand_v: value channels of a head over its key channels.
        head_dim: key channels `K` of a head.
        num_heads: query and key heads `H`.
        num_v_heads: value heads `HV`, a multiple of `H`; `H` when None.
        mode: ``"chunk"`` or ``"fused_recurrent"``, the kernel of long inputs without autograd.
        use_short_conv: convolve `q`, `k`, `v`; otherwise they get SiLU alone.
        allow_neg_eigval: ``beta`` in (0, 2) instead of (0, 1).
        safe_gate: promise that the decay stays within ``lower_bound``, which allows faster kernels.
        lower_bound: with a bound `l` in [-5, 0) the decay is ``l * sigmoid(exp(A_log) * (f_proj(x) + dt_bias))``.
        conv_size: taps of the convolutions.
        conv_bias: learn their bias.
        layer_idx: place in a cache.
        norm_eps: epsilon of the output norm.

    Raises:
        ArgumentError: heads that do not divide, a fractional head, another mode, ``safe_gate`` without a bound.
    """

    undecayed: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias")

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if safe_gate and lower_bound is None:
            raise ArgumentError("`safe_gate` needs a `lower_bound`; -5 is recommended.")
        self.set_head_dim(head_dim, expand_v, hidden_size, num_heads, num_v_heads, mode=mode, layer_idx=layer_idx)
        self.allow_neg_eigval, self.safe_gate, self.lower_bound = allow_neg_eigval, safe_gate, lower_bound
        self.add_projections(use_short_conv, conv_size, conv_bias)
        self.f_proj = self.low_rank(self.num_v_heads * head_dim)
        self.b_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self.add_decay(self.num_v_heads, head_dim)
        self.add_output(self.low_rank(self.value_dim, bias=True), "sigmoid", norm_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the decay gate; the projections initialise themselves."""
        reset_decay_gate(self.A_log, self.dt_bias, low=1)
        if self.safe_gate and not getattr(self.A_log, "_is_hf_initialized", False):
            nn.init.zeros_(self.A_log)

    def rule(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Any]:
        """See :meth:`DeltaLayer.rule`. The state is ``[N, HV, V, K]`` float32."""
        options = {**IN_KERNEL, **call.host_options, **({"safe_gate": self.safe_gate} if call.mode == "chunk" else {})}
        gate = {"A_log": self.A_log, "dt_bias": self.dt_bias, "lower_bound": self.lower_bound}
        g = call.linear(self.f_proj, x).unflatten(-1, (self.num_v_heads, self.head_k_dim))
        kernel = call.pick(chunk_kda, fused_recurrent_kda)
        beta = {"beta": call.linear(self.b_proj, x), "allow_neg_eigval": self.allow_neg_eigval}
        return kernel(q, k, v, g=g, **beta, **gate, **options)
