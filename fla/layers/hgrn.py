# SPDX-License-Identifier: MIT
"""HGRN: a gated linear recurrence for each channel (https://arxiv.org/abs/2311.04823)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from fla.layers._bounded import BoundedLayer
from fla.layers._recurrent import Call, Mixed
from fla.modules.activations import swiglu
from fla.modules.norm import FusedRMSNormGated
from fla.ops._common.checks import ArgumentError
from fla.ops.hgrn import chunk_hgrn, fused_recurrent_hgrn

__all__ = ["HGRNAttention"]


class HGRNAttention(BoundedLayer):
    """A recurrence ``h <- f * h + (1 - f) * silu(i)`` for each channel.

    The decay is ``f = sigmoid(f_proj(x))``, raised to ``lower_bound + (1 - lower_bound) * f`` where a bound is given,
    and ``i = i_proj(x)``. What comes out is normalised over all channels, gated and projected.

    Args:
        mode: ``"chunk"`` or ``"fused_recurrent"``, the kernel of inputs of more than 64 tokens without autograd.
        hidden_size: width `D`.
        expand_ratio: channels of the recurrence over `D`.
        use_short_conv: convolve ``i`` and the input of the decay, without activation.
        conv_size: taps of the convolutions.
        conv_bias: learn their bias.
        elementwise_affine: learn a scale in the output norm.
        norm_eps: epsilon of the output norm.
        layer_idx: place in a cache, and in the stack: layer 0 has no lower bound.

    Raises:
        ArgumentError: a ratio below 1, another mode.
    """

    training_needs_chunk: ClassVar[bool] = False

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_ratio: int = 1,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        elementwise_affine: bool = True,
        norm_eps: float = 1e-5,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(expand_ratio, int) or expand_ratio < 1:
            raise ArgumentError(f"`expand_ratio` must be a positive int, got {expand_ratio!r}.")
        self.mode = self.check_mode(mode)
        self.hidden_size, self.expand_ratio, self.input_dim = hidden_size, expand_ratio, hidden_size * expand_ratio
        self.use_short_conv, self.conv_size, self.conv_bias = use_short_conv, conv_size, conv_bias
        self.layer_idx = layer_idx
        self.i_proj = nn.Linear(hidden_size, self.input_dim, bias=False)
        self.f_proj = nn.Linear(hidden_size, self.input_dim, bias=False)
        self.g_proj = nn.Linear(hidden_size, self.input_dim, bias=False)
        if use_short_conv:
            self.add_short_convs(conv_size, conv_bias, None, i=self.input_dim, f=self.input_dim)
        self.g_norm = FusedRMSNormGated(self.input_dim, elementwise_affine, norm_eps)
        self.o_proj = nn.Linear(self.input_dim, hidden_size, bias=False)

    def mix(self, x: Tensor, call: Call) -> Mixed:
        """See :meth:`RecurrentLayer.mix`; the state is ``[N, D * expand_ratio]`` float32."""
        (i, f), conv_state = self.project(x, "if", call)
        g = self.log_decay(f, call)
        kernel = call.pick(chunk_hgrn, fused_recurrent_hgrn)
        o, recurrent_state = kernel(swiglu(i, -torch.expm1(g)), g, **call.options)
        return Mixed(self.o_proj(self.g_norm(o, call.linear(self.g_proj, x))), recurrent_state, conv_state)
