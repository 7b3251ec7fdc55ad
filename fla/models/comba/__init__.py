# SPDX-License-Identifier: MIT
"""Comba models (Hu et al., "Comba: Improving Bilinear RNNs with Closed-loop Control", 2025)."""

from __future__ import annotations

from fla.models.family import TAIL, Family, config_fields

FAMILY = Family(
    stem="Comba",
    model_type="comba",
    package="comba",
    fields=config_fields(
        "attn_mode hidden_size conv_size head_dim=256 num_heads=6 num_v_heads=None expand_v=2.0 use_output_gate=True "
        "use_short_conv=True use_output_correction=True use_inner_decay=True correction_factor=1.0 "
        "max_position_embeddings hidden_ratio intermediate_size hidden_act num_hidden_layers=21 norm_eps attn " + TAIL
    ),
    mixer="fla.layers.comba:Comba",
    mixer_args="mode=attn_mode hidden_size expand_v head_dim num_heads num_v_heads use_short_conv use_output_gate "
    "use_output_correction use_inner_decay correction_factor conv_size norm_eps",
)

__getattr__, __dir__, __all__ = FAMILY.exports()
