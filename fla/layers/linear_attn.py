# SPDX-License-Identifier: MIT
"""Linear attention with a feature map (https://arxiv.org/abs/2006.16236)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fla.layers._linear import LinearLayer
from fla.layers._recurrent import Call
from fla.modules.activations import elu_p1
from fla.modules.feature_map import DPFPFeatureMap, HadamardFeatureMap, HedgehogFeatureMap, T2RFeatureMap
from fla.modules.norm import RMSNorm
from fla.ops._common.checks import check_choice
from fla.ops.linear_attn import chunk_linear_attn, fused_chunk_linear_attn, fused_recurrent_linear_attn

__all__ = ["LinearAttention"]

_KERNELS: dict[str, Any] = {
    "chunk": chunk_linear_attn,
    "fused_chunk": fused_chunk_linear_attn,
    "fused_recurrent": fused_recurrent_linear_attn,
}


class _EluFeatureMap(nn.Module):
    """``elu(x) + 1``."""

    def forward(self, x: Tensor) -> Tensor:
        return elu_p1(x)


_FEATURE_MAPS: dict[str, Callable[[int], nn.Module]] = {
    "hedgehog": HedgehogFeatureMap,
    "t2r": T2RFeatureMap,
    "elementwise_product": HadamardFeatureMap,
    "dpfp": DPFPFeatureMap,
    "elu": lambda head_dim: _EluFeatureMap(),
    "relu": lambda head_dim: nn.ReLU(),
    "identity": lambda head_dim: nn.Identity(),
}


class LinearAttention(LinearLayer):
    """Attention whose scores are products of features of `q` and `k`, ``S <- S + phi(k) v^T``.

    A head puts out ``S^T phi(q) / sqrt(F)`` with `F` features, divided by the sum of its weights where wanted, which
    is normalised by head and projected.

    Args:
        mode: ``"chunk"``, ``"fused_chunk"`` or ``"fused_recurrent"``, the kernel of long inputs without autograd.
        hidden_size, expand_k, expand_v, num_heads, num_kv_heads: as for :class:`fla.layers.gla.GatedLinearAttention`.
        feature_map: ``"hedgehog"``, ``"t2r"``, ``"elementwise_product"`` (all learned), ``"dpfp"``, ``"elu"``,
            ``"relu"`` or ``"identity"``.
        tie_feature_map_qk: one learned map for `q` and `k`.
        output_norm: ``"rmsnorm"`` or ``"identity"``.
        norm_q: divide the features of `q` by their sum.
        norm_k: divide the features of `k` by their sum.
        do_feature_map_norm: divide outputs by the sum of weights.
        elementwise_affine: learn a scale in the output norm.
        norm_eps: epsilon of the output norm.
        layer_idx: place in a cache.

    Raises:
        ArgumentError: heads that do not divide, a fractional head, another mode, feature map or norm.
    """

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        num_heads: int = 8,
        num_kv_heads: int | None = None,
        feature_map: str = "elementwise_product",
        tie_feature_map_qk: bool = False,
        output_norm: str = "rmsnorm",
        norm_q: bool = False,
        norm_k: bool = False,
        do_feature_map_norm: bool = False,
        elementwise_affine: bool = True,
        norm_eps: float = 1e-5,
        layer_idx: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        check_choice("feature_map", feature_map, _FEATURE_MAPS)
        check_choice("output_norm", output_norm, ("rmsnorm", "identity"))
        self.set_heads(hidden_size, expand_k, expand_v, num_heads, num_kv_heads, mode=mode, layer_idx=layer_idx)
        make = _FEATURE_MAPS[feature_map]
        self.feature_map_q = make(self.head_k_dim)
        self.feature_map_k = self.feature_map_q if tie_feature_map_qk else make(self.head_k_dim)
        self.norm_q, self.norm_k, self.do_feature_map_norm = norm_q, norm_k, do_feature_map_norm
        self.norm: nn.Module = nn.Identity()
        if output_norm == "rmsnorm":
            self.norm = RMSNorm(self.head_v_dim, elementwise_affine, eps=norm_eps, dtype=torch.float32)
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`LinearLayer.features`."""
        q, k = self.feature_map_q(q), self.feature_map_k(k)
        if self.norm_q:
            q = q / (q.sum(-1, keepdim=True) + 1e-4)
        if self.norm_k:
            k = k / (k.sum(-1, keepdim=True) + 1e-4)
        return q, k

    def gate_output(self, x: Tensor, o: Tensor, call: Call) -> Tensor:
        """See :meth:`LinearLayer.gate_output`; a norm of each head."""
        return self.norm(o).flatten(-2)

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Any]:
        """See :meth:`LinearLayer.attend`. The state is ``[N, H, F, V]`` float32, or ``(state, [N, 1, H, F])``."""
        o, state = _KERNELS[call.mode](q, k, v, normalize=self.do_feature_map_norm, **call.options)
        return o, state if call.keep_state else None
