# SPDX-License-Identifier: MIT
"""DeltaNet (https://arxiv.org/abs/2406.06484)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from fla.layers._delta import DeltaLayer
from fla.layers._recurrent import Call, whole
from fla.ops._common.checks import ArgumentError, check_choice
from fla.ops.delta_rule import chunk_delta_rule, fused_recurrent_delta_rule

__all__ = ["DeltaNet"]

_ACTIVATIONS = {
    "silu": F.silu,
    "relu": F.relu,
    "elu": lambda x: F.elu(x) + 1,
    "identity": lambda x: x,
}


def _head_dim(name: str, hidden_size: int, expand: float, num_heads: int) -> int:
    width = whole(f"hidden_size * {name}", hidden_size * expand)
    if num_heads < 1 or width % num_heads:
        raise ArgumentError(f"`num_heads` must divide hidden_size * {name} = {width}, got {num_heads}.")
    return width // num_heads


class DeltaNet(DeltaLayer):
    """The delta rule.

    With `q`, `k`, `v` after short convolutions, `q` and `k` activated and normalised and ``beta = sigmoid(b_proj(x))``,
    each head keeps ``S <- S + beta k (v - S^T k)^T`` and puts out ``S^T q / sqrt(K)``, which is normalised and
    projected.

    Args:
        mode: ``"chunk"`` or ``"fused_recurrent"``, the kernel of inputs longer than 64 tokens.
        d_model: another name of ``hidden_size``, which it overrides.
        hidden_size: width `D`.
        expand_k: key channels of all heads over `D`.
        expand_v: value channels of all heads over `D`.
        num_heads: heads `H`.
        use_beta: learn the write strength ``beta``; otherwise it is one.
        use_gate: gate the output with SiLU.
        use_short_conv: convolve `q`, `k`, `v`.
        conv_size: taps of the convolutions.
        conv_bias: learn their bias.
        allow_neg_eigval: ``beta`` in (0, 2) instead of (0, 1).
        layer_idx: place in a cache.
        qk_activation: of `q` and `k`: ``"silu"``, ``"relu"``, ``"elu"`` (plus one) or ``"identity"``. `v` gets SiLU.
        qk_norm: of `q` and `k`: ``"l2"``, or ``"sum"`` for a sum of absolute values of one.
        norm_eps: epsilon of the output norm.

    Raises:
        ArgumentError: channels that are fractional or that the heads do not divide, another mode, activation or norm.
        NotImplementedError: mode ``"fused_chunk"``.
    """

    any_mode_trains: ClassVar[bool] = True
    silu_without_conv: ClassVar[bool] = False

    def __init__(
        self,
        mode: str = "chunk",
        d_model: int | None = None,
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        num_heads: int = 4,
        use_beta: bool = True,
        use_gate: bool = False,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        allow_neg_eigval: bool = False,
        layer_idx: int | None = None,
        qk_activation: str = "silu",
        qk_norm: str = "l2",
        norm_eps: float = 1e-5,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if mode == "fused_chunk":
            raise NotImplementedError("DeltaNet has no mode 'fused_chunk'; use 'chunk'.")
        check_choice("qk_activation", qk_activation, tuple(_ACTIVATIONS))
        check_choice("qk_norm", qk_norm, ("l2", "sum"))
        if d_model is not None:
            hidden_size = d_model
        self.expand_k, self.expand_v = expand_k, expand_v
        head_k_dim = _head_dim("expand_k", hidden_size, expand_k, num_heads)
        head_v_dim = _head_dim("expand_v", hidden_size, expand_v, num_heads)
        self.set_heads(hidden_size, num_heads, None, head_k_dim, head_v_dim, mode=mode, layer_idx=layer_idx)
        self.use_beta, self.use_gate, self.allow_neg_eigval = use_beta, use_gate, allow_neg_eigval
        self.qk_activation, self.qk_norm = qk_activation, qk_norm
        self.add_projections(use_short_conv, conv_size, conv_bias, qk_silu=qk_activation == "silu")
        if use_beta:
            self.b_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.add_output(nn.Linear(hidden_size, self.value_dim, bias=False) if use_gate else None, "swish", norm_eps)

    def rule(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Any]:
        """See :meth:`DeltaLayer.rule`. The state is ``[N, H, K, V]`` float32."""
        if not self.use_short_conv:
            v = F.silu(v)
        if not (self.use_short_conv and self.qk_activation == "silu"):
            q, k = (_ACTIVATIONS[self.qk_activation](t) for t in (q, k))
        if self.qk_norm == "sum":
            q, k = (F.normalize(t, p=1, dim=-1, eps=1e-6).to(v.dtype) for t in (q, k))
        if self.use_beta:
            beta = call.linear(self.b_proj, x).sigmoid()
            beta = beta * 2 if self.allow_neg_eigval else beta
        else:
            beta = v.new_ones(v.shape[:3])
        kernel = call.pick(chunk_delta_rule, fused_recurrent_delta_rule)
        return kernel(q, k, v, beta=beta, use_qk_l2norm_in_kernel=self.qk_norm == "l2", **call.host_options)
