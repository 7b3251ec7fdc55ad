# SPDX-License-Identifier: MIT
"""HGRN: models of a gated linear recurrence for each channel (https://arxiv.org/abs/2311.04823)."""

from __future__ import annotations

from fla.models.family import TAIL, Family, config_fields

FAMILY = Family(
    stem="HGRN",
    model_type="hgrn",
    package="hgrn",
    fields=config_fields(
        "attn_mode='fused_recurrent' hidden_size num_hidden_layers expand_ratio=1 use_short_conv=False conv_size "
        "use_lower_bound=True max_position_embeddings hidden_ratio intermediate_size hidden_act elementwise_affine "
        "norm_eps attn " + TAIL
    ),
    mixer="fla.layers.hgrn:HGRNAttention",
    mixer_args="mode=attn_mode hidden_size expand_ratio use_short_conv conv_size elementwise_affine norm_eps",
    block="fla.models.lower_bounds:LowerBoundBlock",
    model="fla.models.lower_bounds:ExpandedLowerBoundModel",
)

__getattr__, __dir__, __all__ = FAMILY.exports()
