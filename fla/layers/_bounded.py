# SPDX-License-Identifier: MIT
"""What the layers share whose forget gates have a lower bound (HGRN, HGRN2)."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fla.layers._recurrent import Call, RecurrentLayer
from fla.modules._dtype import upcast

__all__ = ["BoundedLayer"]


class BoundedLayer(RecurrentLayer):
    """A layer whose decay has a lower bound."""

    silu_without_conv: ClassVar[bool] = False

    def log_decay(self, f: Tensor, call: Call) -> Tensor:
        """``log(bound + (1 - bound) * sigmoid(f))`` ``[B, T, D]`` in float32, for ``f`` of that shape.

        The bound is the keyword ``lower_bound`` ``[D]`` of the call, the smallest decay of every channel, in
        [0, 1); it is 0 where that is None, and in layer 0.
        """
        lower_bound = call.kwargs.get("lower_bound")
        g = F.logsigmoid(upcast(f))
        if lower_bound is None or self.layer_idx == 0:
            return g
        bound = upcast(lower_bound)
        return torch.logaddexp(bound.log(), torch.log1p(-bound) + g)
