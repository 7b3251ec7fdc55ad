# SPDX-License-Identifier: MIT
"""Decoders that learn a lower bound of the forget gates, growing from layer to layer (HGRN, HGRN2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fla.models.decoder import Block, DecoderModel
from fla.modules._dtype import upcast

__all__ = ["ExpandedLowerBoundModel", "LowerBoundBlock", "LowerBoundModel"]


class LowerBoundBlock(Block):
    """A block that passes its mixer its row of the bounds."""

    def forward(self, hidden_states: Tensor, *args: Any, lower_bounds: Tensor | None = None, **kwargs: Any) -> Any:
        """As :meth:`Block.forward`, with the parameter ``lower_bounds`` ``[L, D]``.

        The bounds are computed here, from the parameter, so that reentrant checkpointing finds their gradient.
        """
        if lower_bounds is not None:
            shares = torch.softmax(upcast(lower_bounds), 0)
            # The sum of shares 1 to i; layer 0 has no bound.
            kwargs["lower_bound"] = shares[1 : self.layer_idx + 1].sum(0)
        return super().forward(hidden_states, *args, **kwargs)


class LowerBoundModel(DecoderModel):
    """A decoder with the parameter ``lower_bounds`` ``[L, D]`` where the configuration has ``use_lower_bound``."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if config.use_lower_bound:
            self.lower_bounds = nn.Parameter(torch.zeros(config.num_hidden_layers, self.bound_width(config)))

    @staticmethod
    def bound_width(config: Any) -> int:
        """Channels that have a bound."""
        return config.hidden_size

    def reset_parameters(self) -> None:
        """Set the bounds to zero, which spaces them evenly; bounds that were loaded keep their values."""
        bounds = getattr(self, "lower_bounds", None)
        if bounds is not None and not getattr(bounds, "_is_hf_initialized", False):
            nn.init.zeros_(bounds)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See :meth:`DecoderModel.forward`."""
        return super().forward(*args, **kwargs, lower_bounds=getattr(self, "lower_bounds", None))

    # What inspect.signature shows, here and to transformers.
    forward.__wrapped__ = DecoderModel.forward  # type: ignore[attr-defined]


class ExpandedLowerBoundModel(LowerBoundModel):
    """A :class:`LowerBoundModel` whose mixer has ``expand_ratio`` times as many channels."""

    @staticmethod
    def bound_width(config: Any) -> int:
        """See :meth:`LowerBoundModel.bound_width`."""
        return config.hidden_size * config.expand_ratio
