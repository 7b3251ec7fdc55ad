# SPDX-License-Identifier: MIT
"""HGRN2: gated linear recurrence with state expansion (https://arxiv.org/abs/2404.07904)."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fla.layers._bounded import BoundedLayer
from fla.layers._recurrent import Call, Mixed
from fla.modules.norm import RMSNorm
from fla.ops._common.checks import ArgumentError
from fla.ops.gla import chunk_gla, fused_recurrent_gla

__all__ = ["HGRN2Attention"]


class HGRN2Attention(BoundedLayer):
    """Gated linear attention whose key is what its forget gate leaves over.

    With the decay ``f = sigmoid(f_proj(x))``, raised to ``lower_bound + (1 - lower_bound) * f`` where a bound is given,
    ``k = 1 - f``, ``q = silu(q_proj(x))`` and ``v = i_proj(x)``, each head keeps ``S <- diag(f) S + k v^T`` and puts
    out ``S^T q / sqrt(K)``; the norm runs over all heads together.

    Args:
        mode: ``"chunk"`` or ``"fused_recurrent"``, the kernel of inputs of more than 64 tokens. ``"fused_chunk"`` is
            accepted too and runs the chunked one.
        hidden_size: width `D`.
        num_heads: heads `H`; used where ``expand_ratio`` is None.
        expand_ratio: key channels `K` of a head; then ``H = D / expand_ratio``.
        use_short_conv: convolve the projections, without activation.
        conv_size: taps of the convolutions.
        conv_bias: learn their bias.
        elementwise_affine: learn a scale in the output norm.
        norm_eps: accepted and ignored; the epsilon is 1e-5, as in the reference's checkpoints.
        layer_idx: place in a cache, and in the stack: layer 0 has no lower bound.

    Raises:
        ArgumentError: neither heads nor ratio, sizes that do not divide, another mode.
    """

    modes: ClassVar[tuple[str, ...]] = ("chunk", "fused_chunk", "fused_recurrent")
    any_mode_trains: ClassVar[bool] = True

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        num_heads: int | None = None,
        expand_ratio: int | None = 128,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        elementwise_affine: bool = True,
        norm_eps: float = 1e-5,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        name, size = ("num_heads", num_heads) if expand_ratio is None else ("expand_ratio", expand_ratio)
        if size is None:
            raise ArgumentError("One of `num_heads` and `expand_ratio` must be given, got None for both.")
        if size < 1 or hidden_size % size:
            raise ArgumentError(f"`{name}` must divide hidden_size = {hidden_size}, got {size}.")
        self.mode = self.check_mode(mode)
        self.hidden_size = hidden_size
        self.num_heads = size if expand_ratio is None else hidden_size // size
        self.expand_ratio = hidden_size // self.num_heads
        self.use_short_conv, self.conv_size, self.conv_bias = use_short_conv, conv_size, conv_bias
        self.layer_idx = layer_idx
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.f_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.i_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        if use_short_conv:
            self.add_short_convs(conv_size, conv_bias, None, q=hidden_size, f=hidden_size, i=hidden_size)
        self.g_norm = RMSNorm(hidden_size, elementwise_affine, eps=1e-5, dtype=torch.float32)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def mix(self, x: Tensor, call: Call) -> Mixed:
        """See :meth:`RecurrentLayer.mix`; the state is ``[N, H, V, K]`` float32."""
        (q, f, i), conv_state = self.project(x, "qfi", call)
        g = self.log_decay(f, call)
        k = -torch.expm1(g)
        q, k, v, g = (t.unflatten(-1, (self.num_heads, -1)) for t in (F.silu(q), k.to(i.dtype), i, g))
        gate = {"gk" if call.mode == "fused_recurrent" else "g": g}
        kernel = call.pick(chunk_gla, fused_recurrent_gla)
        o, recurrent_state = kernel(q, k, v, **gate, state_v_first=True, **call.host_options)
        return Mixed(self.o_proj(self.g_norm(o.flatten(-2))), recurrent_state, conv_state)
