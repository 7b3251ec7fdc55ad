# SPDX-License-Identifier: MIT
"""Gated linear attention with one decay for each head."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from fla.layers._linear import LinearLayer
from fla.layers._recurrent import Call
from fla.modules._dtype import accumulation_dtype
from fla.modules.activations import logsigmoid
from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

__all__ = ["SimpleGatedLinearAttention"]


class SimpleGatedLinearAttention(LinearLayer):
    """:class:`fla.layers.gla.GatedLinearAttention` with a scalar decay for each head.

    The decay is ``gk = logsigmoid(gk_proj(x)) / gate_logit_normalizer`` ``[B, T, H]``; the arguments are described
    there. The output is gated always.

    Raises:
        ArgumentError: heads that do not divide, a fractional head, another mode or activation.
    """

    modes: ClassVar[tuple[str, ...]] = ("chunk", "fused_recurrent")

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        feature_map: str | None = None,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        gate_fn: str = "swish",
        elementwise_affine: bool = True,
        norm_eps: float = 1e-5,
        gate_logit_normalizer: int = 16,
        fuse_norm: bool = True,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        self.set_heads(hidden_size, expand_k, expand_v, num_heads, num_kv_heads, mode=mode, layer_idx=layer_idx)
        self.set_feature_map(feature_map)
        self.add_convs(use_short_conv, conv_size, conv_bias)
        self.gate_logit_normalizer = gate_logit_normalizer
        self.gk_proj = nn.Linear(hidden_size, num_heads, bias=True)
        self.add_output(True, gate_fn, elementwise_affine, norm_eps, fuse_norm)

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Any]:
        """See :meth:`LinearLayer.attend`. The state is ``[N, H, V, K]`` float32."""
        kernel = call.pick(chunk_simple_gla, fused_recurrent_simple_gla)
        g = call.linear(self.gk_proj, x)
        g = logsigmoid(g, self.gate_logit_normalizer, accumulation_dtype(g.dtype))
        return kernel(q, k, v, g=g, state_v_first=True, **call.host_options)
