# SPDX-License-Identifier: MIT
"""Gated slot attention (https://arxiv.org/abs/2409.07146)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fla.layers._linear import LinearLayer
from fla.layers._recurrent import Call
from fla.modules._dtype import accumulation_dtype
from fla.modules.activations import logsigmoid
from fla.modules.feature_map import ReLUFeatureMap, SwishFeatureMap, T2RFeatureMap
from fla.modules.norm import RMSNorm
from fla.ops._common.checks import check_choice
from fla.ops.gsa import chunk_gsa, fused_recurrent_gsa

__all__ = ["GatedSlotAttention"]

_FEATURE_MAPS = {"swish": SwishFeatureMap, "relu": ReLUFeatureMap, "t2r": T2RFeatureMap}


class GatedSlotAttention(LinearLayer):
    """Attention over a fixed number of slots, which a gate writes and forgets.

    With the gate ``f = sigmoid(f_proj(x)) ** (1 / gate_logit_normalizer)`` of each slot, a head keeps slots of keys
    ``Hk <- Hk diag(f) + k (1 - f)^T`` and of values ``Hv <- diag(f) Hv + (1 - f) v^T`` and puts out
    ``softmax(scale * q Hk) Hv``; SiLU, a norm over all heads together and a projection follow.

    Args:
        mode: ``"chunk"`` or ``"fused_recurrent"``, the kernel of inputs of more than 64 tokens.
        hidden_size, expand_k, expand_v, num_heads, num_kv_heads, use_short_conv, conv_size, conv_bias: as for
            :class:`fla.layers.gla.GatedLinearAttention`. The slots belong to key and value heads.
        num_slots: slots `M` of a head; `K` when None.
        elementwise_affine: learn a scale in the output norm.
        norm_eps: accepted and ignored; the epsilon is 1e-5, as in the reference's checkpoints.
        gate_logit_normalizer: divides the logarithm of the gate.
        feature_map: ``"swish"``, ``"relu"`` or ``"t2r"`` (learned), applied to `q` and `k`; None for none.
        use_output_gate, use_norm: accepted and ignored.
        layer_idx: place in a cache.
        scale: factor of the scores.

    Raises:
        ArgumentError: heads that do not divide, a fractional head, another mode or feature map.
    """

    modes: ClassVar[tuple[str, ...]] = ("chunk", "fused_recurrent")
    any_mode_trains: ClassVar[bool] = True

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        num_slots: int | None = None,
        elementwise_affine: bool = True,
        norm_eps: float = 1e-5,
        gate_logit_normalizer: int = 8,
        feature_map: str | None = "swish",
        use_output_gate: bool = False,
        use_norm: bool = True,
        layer_idx: int | None = None,
        scale: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.set_heads(hidden_size, expand_k, expand_v, num_heads, num_kv_heads, mode=mode, layer_idx=layer_idx)
        self.num_slots = self.head_k_dim if num_slots is None else num_slots
        self.gate_logit_normalizer, self.scale = gate_logit_normalizer, scale
        self.feature_map = None
        if feature_map is not None:
            check_choice("feature_map", feature_map, _FEATURE_MAPS)
            cls: Any = _FEATURE_MAPS[feature_map]
            self.feature_map = cls(self.head_k_dim, self.head_k_dim) if feature_map == "t2r" else cls()
        self.add_convs(use_short_conv, conv_size, conv_bias)
        self.f_proj = nn.Linear(hidden_size, self.num_kv_heads * self.num_slots, bias=False)
        self.g_norm = RMSNorm(self.value_dim, elementwise_affine, eps=1e-5, dtype=torch.float32)
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)

    def group_heads(self, x: Tensor) -> Tensor:
        """``x``: the op knows groups."""
        return x

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`LinearLayer.features`."""
        return (q, k) if self.feature_map is None else (self.feature_map(q), self.feature_map(k))

    def gate_output(self, x: Tensor, o: Tensor, call: Call) -> Tensor:
        """See :meth:`LinearLayer.gate_output`; SiLU and a norm over all heads."""
        return self.g_norm(F.silu(o.flatten(-2)))

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Any]:
        """See :meth:`LinearLayer.attend`. The states are ``[N, num_kv_heads, K, M]`` and ``[N, ., M, V]`` float32."""
        f = call.linear(self.f_proj, x)
        f = logsigmoid(f, self.gate_logit_normalizer, accumulation_dtype(f.dtype))
        f = f.unflatten(-1, (-1, self.num_slots))
        kernel = call.pick(chunk_gsa, fused_recurrent_gsa)
        o, states = kernel(q, k, F.silu(v), -torch.expm1(f), f, scale=self.scale, **call.host_options)
        return o, tuple(states) if call.keep_state else None
