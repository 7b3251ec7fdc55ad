# SPDX-License-Identifier: MIT
"""What the layers share whose forget gates have a lower bound (HGRN, HGRN2)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fla.layers._recurrent import Call, RecurrentLayer
from fla.modules._dtype import upcast

__all__ = ["BoundedLayer"]


class BoundedLayer(RecurrentLayer):
    """A layer whose decay has a lower bound."""

    silu_without_conv: ClassVar[bool] = False

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        lower_bound: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None, Any]:
        """See :meth:`RecurrentLayer.forward`, and :meth:`log_decay` for ``lower_bound``."""
        kwargs["lower_bound"] = lower_bound
        return super().forward(hidden_states, attention_mask, past_key_values, use_cache, output_attentions, **kwargs)

    def log_decay(self, f: Tensor, call: Call) -> Tensor:
        """``log(bound + (1 - bound) * sigmoid(f))`` ``[B, T, D]`` in float32, for ``f`` of that shape.

        The bound is the keyword ``lower_bound`` ``[D]`` of :meth:`forward`, the smallest decay of every channel, in
        [0, 1); it is 0 where that is None, and in layer 0.
        """
        lower_bound = call.kwargs["lower_bound"]
        g = F.logsigmoid(upcast(f))
        if lower_bound is None or self.layer_idx == 0:
            return g
        bound = upcast(lower_bound)
        return torch.logaddexp(bound.log(), torch.log1p(-bound) + g)
