# SPDX-License-Identifier: MIT
"""Comba (Hu et al., "Comba: Improving Bilinear RNNs with Closed-loop Control", 2025)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fla.layers._recurrent import Call
from fla.layers.gated_deltanet import GatedDeltaNet
from fla.ops._common.gates import compute_dtype
from fla.ops.comba import chunk_comba, fused_recurrent_comba

__all__ = ["Comba"]


class Comba(GatedDeltaNet):
    """A gated delta rule that reads with a key of its own, before the state decays, and corrects the query.

    With `q`, `k`, `v`, ``g`` and ``beta`` as in :class:`fla.layers.GatedDeltaNet`, the read key is
    ``p = k * sigmoid(decay)`` and the query ``q - D * p``; then `q`, `k` and `p` are normalised, and each value head
    keeps ``S <- exp(g) S + beta k (v - S^T p)^T`` and puts out ``S^T q / sqrt(K)``, which is normalised, gated and
    projected.

    Args:
        hidden_size: width `D`.
        expand_v: value channels of a head over its key channels.
        head_dim: key channels `K` of a head.
        num_heads: query and key heads `H`.
        num_v_heads: value heads `HV`, a multiple of `H`; `H` when None.
        mode: ``"chunk"`` or ``"fused_recurrent"``, the kernel of long inputs without autograd.
        use_short_conv: convolve `q`, `k`, `v`; otherwise they get SiLU alone.
        use_output_gate: gate the output with a sigmoid.
        use_output_correction: subtract ``D * p`` from the query.
        use_inner_decay: learn ``decay``; without it ``p = k``. As `p` is normalised, it acts through the correction.
        correction_factor: initial value of ``D``.
        conv_size: taps of the convolutions.
        conv_bias: learn their bias.
        layer_idx: place in a cache.
        norm_eps: epsilon of the output norm.

    Raises:
        ArgumentError: heads that do not divide, a fractional head, another mode.
    """

    undecayed: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias", "D")

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 2,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_short_conv: bool = True,
        use_output_gate: bool = True,
        use_output_correction: bool = True,
        use_inner_decay: bool = True,
        correction_factor: float = 1.0,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        **kwargs: Any,
    ) -> None:
        output = {"use_gate": use_output_gate, "norm_eps": norm_eps, "output_gate_activation": "sigmoid"}
        options: Any = {"use_short_conv": use_short_conv, "conv_size": conv_size, "conv_bias": conv_bias, **output}
        options |= {"hidden_size": hidden_size, "head_dim": head_dim, "expand_v": expand_v, "mode": mode}
        super().__init__(num_heads=num_heads, num_v_heads=num_v_heads, layer_idx=layer_idx, **options)
        self.use_output_gate, self.use_output_correction = use_output_gate, use_output_correction
        self.use_inner_decay, self.correction_factor = use_inner_decay, correction_factor
        if use_inner_decay:
            self.decay = nn.Parameter(torch.ones(num_heads, dtype=torch.float32))
        if use_output_correction:
            self.D = nn.Parameter(torch.full((num_heads,), float(correction_factor), dtype=torch.float32))

    def reset_parameters(self) -> None:
        """Initialise the decays and the correction; the projections initialise themselves."""
        super().reset_parameters()
        # The base class calls this before there are any.
        if hasattr(self, "decay"):
            nn.init.ones_(self.decay)
        if hasattr(self, "D"):
            nn.init.constant_(self.D, self.correction_factor)

    def rule(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Any]:
        """See :meth:`DeltaLayer.rule`. The state is ``[N, HV, K, V]`` float32."""
        p = k * self.decay.sigmoid().to(k.dtype)[:, None] if self.use_inner_decay else k
        if self.use_output_correction:
            q = q - self.D.to(q.dtype)[:, None] * p
        a = call.linear(self.a_proj, x)
        dtype = compute_dtype(a.dtype)
        g = -self.A_log.to(dtype).exp() * F.softplus(a.to(dtype) + self.dt_bias)
        kernel = call.pick(chunk_comba, fused_recurrent_comba)
        beta = call.linear(self.b_proj, x).sigmoid()
        return kernel(q=q, k=k, v=v, p=p, g=g, beta=beta, use_qk_l2norm_in_kernel=True, **call.host_options)
