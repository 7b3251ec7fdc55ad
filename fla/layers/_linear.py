# SPDX-License-Identifier: MIT
"""What the layers of linear attention share: heads, feature map, output stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fla.layers._recurrent import Call, Mixed, RecurrentLayer, whole
from fla.modules.activations import ACT2FN
from fla.modules.norm import FusedRMSNormGated, RMSNorm
from fla.ops._common.checks import ArgumentError, check_choice

__all__ = ["LinearLayer"]


class LinearLayer(RecurrentLayer):
    """Heads of ``q``, ``k``, ``v`` by expansion ratios, several query heads to a key and value head where wanted.

    Attributes:
        num_heads: query heads `H`.
        num_kv_heads: key and value heads, a divisor of `H`; query head `i` uses ``i // (H / num_kv_heads)``.
        head_k_dim: key channels `K` of a head, ``hidden_size * expand_k / H``.
        head_v_dim: value channels `V` of a head, ``hidden_size * expand_v / H``.
        key_dim, value_dim: channels of all query heads, and of as many value heads.
        key_dim_per_group, value_dim_per_group: channels that ``k_proj`` and ``v_proj`` put out.
    """

    modes: ClassVar[tuple[str, ...]] = ("chunk", "fused_chunk", "fused_recurrent")
    silu_without_conv: ClassVar[bool] = False
    training_needs_chunk: ClassVar[bool] = False
    use_short_conv = False
    feature_map: Any
    feature_map_fn: Callable[[Tensor], Tensor] | None = None

    def set_heads(
        self,
        hidden_size: int,
        expand_k: float,
        expand_v: float,
        num_heads: int,
        num_kv_heads: int | None,
        *,
        mode: str,
        layer_idx: int | None,
    ) -> None:
        """Check and set the sizes, and register the projections of `q`, `k`, `v`; ``num_kv_heads=None`` means `H`."""
        if num_kv_heads is None:
            num_kv_heads = num_heads
        if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
            raise ArgumentError(f"`num_kv_heads` must divide num_heads = {num_heads}, got {num_kv_heads}.")
        self.mode = self.check_mode(mode)
        self.hidden_size, self.expand_k, self.expand_v = hidden_size, expand_k, expand_v
        self.num_heads, self.num_kv_heads, self.num_kv_groups = num_heads, num_kv_heads, num_heads // num_kv_heads
        self.key_dim = whole("hidden_size * expand_k", hidden_size * expand_k)
        self.value_dim = whole("hidden_size * expand_v", hidden_size * expand_v)
        self.head_k_dim = whole("hidden_size * expand_k / num_heads", self.key_dim / num_heads)
        self.head_v_dim = whole("hidden_size * expand_v / num_heads", self.value_dim / num_heads)
        self.key_dim_per_group = self.key_dim // self.num_kv_groups
        self.value_dim_per_group = self.value_dim // self.num_kv_groups
        self.layer_idx = layer_idx
        self.q_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.key_dim_per_group, bias=False)
        self.v_proj = nn.Linear(hidden_size, self.value_dim_per_group, bias=False)

    def add_convs(self, use_short_conv: bool, conv_size: int, conv_bias: bool) -> None:
        """Register convolutions of `q`, `k`, `v` with SiLU where wanted."""
        self.use_short_conv, self.conv_size, self.conv_bias = use_short_conv, conv_size, conv_bias
        if use_short_conv:
            k, v = self.key_dim_per_group, self.value_dim_per_group
            self.add_short_convs(conv_size, conv_bias, q=self.key_dim, k=k, v=v)

    def set_feature_map(self, feature_map: str | None) -> None:
        """Apply an activation of :data:`fla.modules.activations.ACT2FN` to `q` and `k`."""
        self.feature_map = feature_map
        if feature_map is not None:
            check_choice("feature_map", feature_map, ACT2FN)
            self.feature_map_fn = ACT2FN[feature_map]

    def add_output(
        self, use_output_gate: bool, gate_fn: str, elementwise_affine: bool, norm_eps: float, fuse_norm: bool
    ) -> None:
        """Register gate, norm and projection of the output.

        A swish gate is fused with the norm, which is then called ``g_norm_swish_gate`` instead of ``g_norm``.
        """
        self.use_output_gate = use_output_gate
        self.fuse_norm_and_gate = use_output_gate and fuse_norm and gate_fn == "swish"
        if use_output_gate:
            check_choice("gate_fn", gate_fn, ACT2FN)
            self.gate_fn = ACT2FN[gate_fn]
            self.g_proj = nn.Linear(self.hidden_size, self.value_dim, bias=False)
        if self.fuse_norm_and_gate:
            self.g_norm_swish_gate = FusedRMSNormGated(self.head_v_dim, elementwise_affine, norm_eps)
        else:
            self.g_norm = RMSNorm(self.head_v_dim, elementwise_affine, eps=norm_eps, dtype=torch.float32)
        self.o_proj = nn.Linear(self.value_dim, self.hidden_size, bias=False)

    def group_heads(self, x: Tensor) -> Tensor:
        """``[B, T, num_kv_heads, .]`` to ``[B, T, H, .]``, every head for its whole group."""
        return x if self.num_kv_groups == 1 else x.repeat_interleave(self.num_kv_groups, 2)

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The feature map of `q` ``[B, T, H, K]`` and `k` ``[B, T, num_kv_heads, K]``."""
        f = self.feature_map_fn
        return (q, k) if f is None else (f(q), f(k))

    def gate_output(self, x: Tensor, o: Tensor, call: Call) -> Tensor:
        """Norm and gate of the heads ``o`` ``[B, T, H, V]`` that came out for ``x``: ``[B, T, H * V]``."""
        if self.fuse_norm_and_gate:
            gate = call.linear(self.g_proj, x).unflatten(-1, (self.num_heads, self.head_v_dim))
            return self.g_norm_swish_gate(o, gate).flatten(-2)
        o = self.g_norm(o).flatten(-2)
        return o * self.gate_fn(call.linear(self.g_proj, x)) if self.use_output_gate else o

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Any]:
        """The layer's kernel.

        Args:
            x: input of the layer ``[B, T, D]``.
            q, k: ``[B, T, H, K]``, behind the feature map.
            v: ``[B, T, H, V]``.
            call: what is asked for.

        Returns:
            Outputs ``[B, T, H, V]`` and the final states, or None.
        """
        raise NotImplementedError

    def mix(self, x: Tensor, call: Call) -> Mixed:
        """See :meth:`RecurrentLayer.mix`."""
        (q, k, v), conv_state = self.project(x, "qkv", call)
        q, k = self.features(*(t.unflatten(-1, (-1, self.head_k_dim)) for t in (q, k)))
        k, v = self.group_heads(k), self.group_heads(v.unflatten(-1, (-1, self.head_v_dim)))
        o, recurrent_state = self.attend(x, q, k, v, call)
        return Mixed(self.o_proj(self.gate_output(x, o, call)), recurrent_state, conv_state)
