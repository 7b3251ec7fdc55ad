# SPDX-License-Identifier: MIT
"""Kimi Delta Attention (Kimi Linear, https://arxiv.org/abs/2510.26692)."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fla.layers._recurrent import Mixed, RecurrentLayer, reset_decay_gate, whole
from fla.modules.norm import FusedRMSNormGated
from fla.ops._common.checks import ArgumentError
from fla.ops.kda import chunk_kda, fused_recurrent_kda

__all__ = ["KimiDeltaAttention"]


class KimiDeltaAttention(RecurrentLayer):
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
        if num_v_heads is None:
            num_v_heads = num_heads
        if num_heads < 1 or num_v_heads % num_heads:
            raise ArgumentError(f"`num_v_heads` must be a multiple of num_heads = {num_heads}, got {num_v_heads}.")
        if safe_gate and lower_bound is None:
            raise ArgumentError("`safe_gate` needs a `lower_bound`; -5 is recommended.")
        if not use_short_conv:
            warnings.warn("KDA without short convolutions trains worse; keep use_short_conv=True.", stacklevel=2)
        self.mode = self.check_mode(mode)
        self.hidden_size = hidden_size
        self.expand_v = expand_v
        self.head_dim = self.head_k_dim = head_dim
        self.head_v_dim = whole("head_dim * expand_v", head_dim * expand_v)
        self.num_heads = num_heads
        self.num_v_heads = num_v_heads
        self.key_dim = num_heads * head_dim
        self.value_dim = num_v_heads * self.head_v_dim
        self.use_short_conv = use_short_conv
        self.allow_neg_eigval = allow_neg_eigval
        self.safe_gate = safe_gate
        self.lower_bound = lower_bound
        self.conv_size = conv_size
        self.conv_bias = conv_bias
        self.layer_idx = layer_idx

        self.q_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
        if use_short_conv:
            self.add_short_convs(conv_size, conv_bias, q=self.key_dim, k=self.key_dim, v=self.value_dim)
        self.f_proj = nn.Sequential(
            nn.Linear(hidden_size, self.head_v_dim, bias=False),
            nn.Linear(self.head_v_dim, num_v_heads * head_dim, bias=False),
        )
        self.b_proj = nn.Linear(hidden_size, num_v_heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(num_v_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(num_v_heads * head_dim, dtype=torch.float32))
        self.g_proj = nn.Sequential(
            nn.Linear(hidden_size, self.head_v_dim, bias=False),
            nn.Linear(self.head_v_dim, self.value_dim, bias=True),
        )
        self.o_norm = FusedRMSNormGated(self.head_v_dim, eps=norm_eps, activation="sigmoid")
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the decay gate; the projections initialise themselves."""
        reset_decay_gate(self.A_log, self.dt_bias, low=1)
        if self.safe_gate and not getattr(self.A_log, "_is_hf_initialized", False):
            nn.init.zeros_(self.A_log)

    def mix(
        self,
        x: Tensor,
        *,
        mode: str,
        state: dict[str, Any],
        keep_state: bool,
        cu_seqlens: Tensor | None,
        **kwargs: Any,
    ) -> Mixed:
        """See :meth:`RecurrentLayer.mix`. The recurrent state is ``[N, HV, V, K]`` float32."""
        (q, k, v), conv_state = self.project(x, "qkv", state.get("conv_state"), keep_state, cu_seqlens, **kwargs)
        q, k = (t.unflatten(-1, (self.num_heads, self.head_k_dim)) for t in (q, k))
        v = v.unflatten(-1, (self.num_v_heads, self.head_v_dim))
        options: dict[str, Any] = {
            "g": self.f_proj(x).unflatten(-1, (self.num_v_heads, self.head_k_dim)),
            "beta": self.b_proj(x),
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "initial_state": state.get("recurrent_state"),
            "output_final_state": keep_state,
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": self.allow_neg_eigval,
            "lower_bound": self.lower_bound,
            "state_v_first": True,
            "cu_seqlens": cu_seqlens,
        }
        if mode == "chunk":
            options.update(safe_gate=self.safe_gate, cu_seqlens_cpu=kwargs.get("cu_seqlens_cpu"))
            o, recurrent_state = chunk_kda(q, k, v, **options)[:2]
        else:
            o, recurrent_state = fused_recurrent_kda(q, k, v, **options)
        gate = self.g_proj(x).unflatten(-1, (self.num_v_heads, self.head_v_dim))
        return Mixed(self.o_proj(self.o_norm(o, gate).flatten(-2)), recurrent_state, conv_state)
