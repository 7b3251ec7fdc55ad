# SPDX-License-Identifier: MIT
"""Comba models (Hu et al., "Comba: Improving Bilinear RNNs with Closed-loop Control", 2025)."""

from __future__ import annotations

from fla.models.family import Family, config_fields

FAMILY = Family(
    stem="Comba",
    model_type="comba",
    package="comba",
    fields=config_fields(
        "attn_mode hidden_size conv_size head_dim num_heads num_v_heads expand_v use_output_gate use_short_conv "
        "use_output_correction use_inner_decay correction_factor max_position_embeddings hidden_ratio "
        "intermediate_size hidden_act num_hidden_layers norm_eps attn use_cache pad_token_id bos_token_id "
        "eos_token_id tie_word_embeddings initializer_range fuse_norm fuse_swiglu fuse_cross_entropy "
        "fuse_linear_cross_entropy use_l2warp vocab_size attnres_block_size",
        head_dim=256,
        num_heads=6,
        num_v_heads=None,
        expand_v=2.0,
        use_output_gate=True,
        use_short_conv=True,
        use_output_correction=True,
        use_inner_decay=True,
        correction_factor=1.0,
        num_hidden_layers=21,
    ),
    mixer="fla.layers.comba:Comba",
    mixer_args="mode=attn_mode hidden_size expand_v head_dim num_heads num_v_heads use_short_conv use_output_gate "
    "use_output_correction use_inner_decay correction_factor conv_size norm_eps",
)

__getattr__, __dir__, __all__ = FAMILY.exports()
