# SPDX-License-Identifier: MIT
"""HGRN2: models of gated linear recurrence with state expansion (https://arxiv.org/abs/2404.07904)."""

from __future__ import annotations

from fla.models.family import TAIL, Family, config_fields

FAMILY = Family(
    stem="HGRN2",
    model_type="hgrn2",
    package="hgrn2",
    fields=config_fields(
        "hidden_size num_hidden_layers attn_mode num_heads=None expand_ratio=128 use_short_conv=False conv_size "
        "use_lower_bound=True hidden_ratio intermediate_size hidden_act max_position_embeddings elementwise_affine "
        "norm_eps attn " + TAIL
    ),
    mixer="fla.layers.hgrn2:HGRN2Attention",
    mixer_args="mode=attn_mode hidden_size num_heads expand_ratio use_short_conv conv_size elementwise_affine norm_eps",
    block="fla.models.lower_bounds:LowerBoundBlock",
    model="fla.models.lower_bounds:LowerBoundModel",
)

__getattr__, __dir__, __all__ = FAMILY.exports()
