# SPDX-License-Identifier: MIT
"""Retention (RetNet, https://arxiv.org/abs/2307.08621)."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from fla.layers._linear import LinearLayer
from fla.layers._recurrent import Call
from fla.layers.utils import check_padding_mask, require_cache_layer_idx, row_offsets
from fla.modules.rotary import RotaryEmbedding
from fla.ops._common.checks import ArgumentError
from fla.ops.retention import chunk_retention, fused_chunk_retention, fused_recurrent_retention, parallel_retention

__all__ = ["MultiScaleRetention"]

_KERNELS: dict[str, Any] = {
    "chunk": chunk_retention,
    "fused_chunk": fused_chunk_retention,
    "fused_recurrent": fused_recurrent_retention,
}


class MultiScaleRetention(LinearLayer):
    """Linear attention with rotary positions and a fixed decay for each head.

    Head `h` keeps ``S <- (1 - 2 ** (-5 - h)) S + k v^T`` and puts out ``S^T q / sqrt(K)``, with `q` and `k` rotated by
    their positions; the output is normalised, gated and projected.

    Args:
        mode: ``"chunk"``, ``"fused_chunk"``, ``"parallel"`` or ``"fused_recurrent"``, the kernel of long inputs without
            autograd. ``"parallel"`` gives way to ``"chunk"`` where states are read or kept.
        expand_k: key channels of all heads over `D`; at most 256 to a head.
        hidden_size, expand_v, num_heads, num_kv_heads, feature_map, use_short_conv, conv_size, conv_bias: as for
            :class:`fla.layers.gla.GatedLinearAttention`.
        use_output_gate, gate_fn, elementwise_affine, norm_eps, fuse_norm, layer_idx: as there.

    Raises:
        ArgumentError: heads that do not divide, a fractional, odd or too large head, another mode or activation.
    """

    modes: ClassVar[tuple[str, ...]] = ("chunk", "fused_chunk", "fused_recurrent", "parallel")

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 2.0,
        num_heads: int = 8,
        num_kv_heads: int | None = None,
        feature_map: str | None = None,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        use_output_gate: bool = True,
        gate_fn: str = "swish",
        elementwise_affine: bool = True,
        norm_eps: float = 1e-5,
        fuse_norm: bool = True,
        layer_idx: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.set_heads(hidden_size, expand_k, expand_v, num_heads, num_kv_heads, mode=mode, layer_idx=layer_idx)
        if self.head_k_dim > 256 or self.head_k_dim % 2:
            raise ArgumentError(
                "`hidden_size * expand_k / num_heads` must be an even number of at most 256 channels, "
                f"got {self.head_k_dim}."
            )
        self.set_feature_map(feature_map)
        self.add_convs(use_short_conv, conv_size, conv_bias)
        self.add_output(use_output_gate, gate_fn, elementwise_affine, norm_eps, fuse_norm)
        self.rotary = RotaryEmbedding(dim=self.head_k_dim)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None, Any]:
        """See :meth:`RecurrentLayer.forward`. Positions count the valid tokens of a row, in the cache too."""
        cache = kwargs.get("cache") if past_key_values is None else past_key_values
        require_cache_layer_idx(self, cache)
        check_padding_mask(attention_mask)
        length = hidden_states.shape[1]
        seen = 0 if cache is None else cache.get_seq_length(self.layer_idx)
        offset: int | Tensor = seen
        if seen and attention_mask is not None and kwargs.get("cu_seqlens") is None:
            offset = row_offsets(attention_mask, length, seen)
        longest = seen + length
        if (static := kwargs.get("static_position")) is not None:
            offset, longest = static.offsets, static.limit
        kwargs["rotary"] = {"seqlen_offset": offset, "max_seqlen": longest}
        return super().forward(hidden_states, attention_mask, past_key_values, use_cache, output_attentions, **kwargs)

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Any]:
        """See :meth:`LinearLayer.attend`. The state is ``[N, H, K, V]`` float32."""
        q, k = self.rotary(q, k, cu_seqlens=call.cu_seqlens, **call.kwargs["rotary"])
        if call.mode == "parallel" and not call.keep_state and call.state.get("recurrent_state") is None:
            return parallel_retention(q, k, v, cu_seqlens=call.cu_seqlens)[0], None
        return _KERNELS["chunk" if call.mode == "parallel" else call.mode](q, k, v, **call.options)
