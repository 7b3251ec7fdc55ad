# SPDX-License-Identifier: MIT
"""Gated linear attention (https://arxiv.org/abs/2312.06635)."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from fla.layers._linear import LinearLayer
from fla.layers._recurrent import Call
from fla.modules._dtype import accumulation_dtype
from fla.modules.activations import logsigmoid
from fla.ops.gla import chunk_gla, fused_recurrent_gla

__all__ = ["GatedLinearAttention"]


class GatedLinearAttention(LinearLayer):
    """Linear attention whose state decays by a factor of its own in every key channel.

    With the decay ``gk = logsigmoid(gk_proj(x)) / gate_logit_normalizer``, each head keeps
    ``S <- diag(exp(gk)) S + k v^T`` and puts out ``S^T q / sqrt(K)``, which is normalised, gated and projected.

    Args:
        mode: ``"chunk"`` or ``"fused_recurrent"``, the kernel of inputs of more than 64 tokens. ``"fused_chunk"`` is
            accepted too and runs the chunked one.
        hidden_size: width `D`.
        expand_k: key channels of all heads over `D`.
        expand_v: value channels of all heads over `D`.
        num_heads: query heads `H`.
        num_kv_heads: key and value heads; `H` when None.
        feature_map: activation of `q` and `k`, one of :data:`fla.modules.activations.ACT2FN`.
        use_short_conv: convolve `q`, `k`, `v`, with SiLU; otherwise they get no activation.
        conv_size: taps of the convolutions.
        conv_bias: learn their bias.
        use_output_gate: gate the output.
        gate_fn: activation of that gate.
        elementwise_affine: learn a scale in the output norm.
        norm_eps: epsilon of the output norm.
        gate_logit_normalizer: divides the logarithm of the decay.
        gate_low_rank_dim: width inside ``gk_proj``.
        clamp_min: smallest logarithm of the decay.
        fuse_norm: compute a swish gate together with the norm; changes the name of the norm.
        layer_idx: place in a cache.

    Raises:
        ArgumentError: heads that do not divide, a fractional head, another mode or activation.
    """

    any_mode_trains: ClassVar[bool] = True

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        feature_map: str | None = None,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        use_output_gate: bool = True,
        gate_fn: str = "swish",
        elementwise_affine: bool = True,
        norm_eps: float = 1e-5,
        gate_logit_normalizer: int = 16,
        gate_low_rank_dim: int = 16,
        clamp_min: float | None = None,
        fuse_norm: bool = True,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        self.set_heads(hidden_size, expand_k, expand_v, num_heads, num_kv_heads, mode=mode, layer_idx=layer_idx)
        self.set_feature_map(feature_map)
        self.add_convs(use_short_conv, conv_size, conv_bias)
        self.gate_logit_normalizer = gate_logit_normalizer
        self.clamp_min = clamp_min
        self.gk_proj = nn.Sequential(
            nn.Linear(hidden_size, gate_low_rank_dim, bias=False),
            nn.Linear(gate_low_rank_dim, self.key_dim_per_group, bias=True),
        )
        self.add_output(use_output_gate, gate_fn, elementwise_affine, norm_eps, fuse_norm)

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Any]:
        """See :meth:`LinearLayer.attend`. The state is ``[N, H, V, K]`` float32."""
        gk = call.linear(self.gk_proj, x)
        gk = logsigmoid(gk, self.gate_logit_normalizer, accumulation_dtype(gk.dtype))
        if self.clamp_min is not None:
            gk = gk.clamp(min=self.clamp_min)
        gk = self.group_heads(gk.unflatten(-1, (-1, self.head_k_dim)))
        name = "gk" if call.mode == "fused_recurrent" else "g"
        kernel = call.pick(chunk_gla, fused_recurrent_gla)
        return kernel(q, k, v, **{name: gk}, state_v_first=True, **call.host_options)
