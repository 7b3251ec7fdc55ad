# SPDX-License-Identifier: MIT
"""Gated DeltaNet (https://arxiv.org/abs/2412.06464)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fla.layers._delta import IN_KERNEL, DeltaLayer
from fla.layers._recurrent import Call, reset_decay_gate
from fla.modules._plain import is_plain
from fla.modules.causal_conv1d import ShortConvolution, causal_conv1d
from fla.ops._common.checks import check_choice
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

__all__ = ["GatedDeltaNet"]

LARGE = 4 << 20
"""Beyond this many elements, copying `q`, `k`, `v` side by side takes longer than two launches."""


class GatedDeltaNet(DeltaLayer):
    """A delta rule whose state decays by one factor per head.

    With `q`, `k`, `v` after short convolutions, `q` and `k` normalised, ``beta = sigmoid(b_proj(x))`` and the decay
    ``g = -exp(A_log) * softplus(a_proj(x) + dt_bias)``, each value head keeps ``S <- exp(g) S``,
    ``S <- S + beta k (v - S^T k)^T`` and puts out ``S^T q / sqrt(K)``, which is normalised, gated and projected.

    Args:
        hidden_size: width `D`.
        expand_v: value channels of a head over its key channels.
        head_dim: key channels `K` of a head.
        num_heads: query and key heads `H`.
        num_v_heads: value heads `HV`, a multiple of `H`; `H` when None.
        mode: ``"chunk"`` or ``"fused_recurrent"``, the kernel of long inputs without autograd.
        use_gate: gate the output.
        use_short_conv: convolve `q`, `k`, `v`; otherwise they get SiLU alone.
        allow_neg_eigval: ``beta`` in (0, 2) instead of (0, 1).
        conv_size: taps of the convolutions.
        conv_bias: learn their bias.
        layer_idx: place in a cache.
        norm_eps: epsilon of the output norm.
        output_gate_activation: ``"swish"``, ``"silu"`` or ``"sigmoid"``.

    Raises:
        ArgumentError: heads that do not divide, a fractional head, another mode or activation.
    """

    undecayed: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias")

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 2,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_gate: bool = True,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        output_gate_activation: str = "swish",
        **kwargs: Any,
    ) -> None:
        super().__init__()
        check_choice("output_gate_activation", output_gate_activation, ("swish", "silu", "sigmoid"))
        self.set_head_dim(head_dim, expand_v, hidden_size, num_heads, num_v_heads, mode=mode, layer_idx=layer_idx)
        self.use_gate, self.allow_neg_eigval = use_gate, allow_neg_eigval
        self.add_projections(use_short_conv, conv_size, conv_bias)
        self.a_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self.b_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self.add_decay(self.num_v_heads, 1)
        gate = nn.Linear(hidden_size, self.value_dim, bias=False) if use_gate else None
        self.add_output(gate, output_gate_activation, norm_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the decay; the projections initialise themselves."""
        reset_decay_gate(self.A_log, self.dt_bias, low=0)

    def _use_fused_qkv_conv(self, last_state: Any, use_cache: bool | None, cu_seqlens: Tensor | None) -> bool:
        """Whether one convolution may run over `q`, `k` and `v` side by side instead of one over each."""
        if not self.use_short_conv or last_state or use_cache or cu_seqlens is not None:
            return False
        convs: list[Any] = [self.q_conv1d, self.k_conv1d, self.v_conv1d]
        if not all(is_plain(conv, ShortConvolution) for conv in convs):
            return False
        return len({(c.activation, c.backend, c.kernel_size, c.bias is None, c.weight.dtype) for c in convs}) == 1

    def project(self, x: Tensor, names: str, call: Call) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...] | None]:
        """See :meth:`RecurrentLayer.project`. Without states to keep, three small convolutions are one."""
        fuse = self._use_fused_qkv_conv(call.state.get("conv_state"), call.keep_state, call.cu_seqlens)
        if not fuse or x.numel() > LARGE:
            return super().project(x, names, call)
        convs: list[Any] = [getattr(self, f"{name}_conv1d") for name in names]
        y, _ = causal_conv1d(
            torch.cat([call.linear(getattr(self, f"{name}_proj"), x) for name in names], -1),
            torch.cat([conv.weight[:, 0] for conv in convs]),
            None if convs[0].bias is None else torch.cat([conv.bias for conv in convs]),
            activation=convs[0].activation,
            backend=convs[0].backend,
        )
        return y.split([conv.hidden_size for conv in convs], -1), None

    def rule(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Any]:
        """See :meth:`DeltaLayer.rule`. The state is ``[N, HV, V, K]`` float32."""
        kernel = call.pick(chunk_gated_delta_rule, fused_recurrent_gated_delta_rule)
        gate = {"A_log": self.A_log, "dt_bias": self.dt_bias, "allow_neg_eigval": self.allow_neg_eigval}
        gate |= {"g": call.linear(self.a_proj, x), "beta": call.linear(self.b_proj, x)}
        return kernel(q, k, v, **gate, **IN_KERNEL, **call.host_options)
