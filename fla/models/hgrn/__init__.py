# SPDX-License-Identifier: MIT
"""HGRN: models of a gated linear recurrence for each channel (https://arxiv.org/abs/2311.04823)."""

from __future__ import annotations

from fla.models.family import Family, config_fields

FAMILY = Family(
    stem="HGRN",
    model_type="hgrn",
    package="hgrn",
    fields=config_fields(
        "attn_mode hidden_size num_hidden_layers expand_ratio use_short_conv conv_size use_lower_bound "
        "max_position_embeddings hidden_ratio intermediate_size hidden_act elementwise_affine norm_eps attn use_cache "
        "pad_token_id bos_token_id eos_token_id tie_word_embeddings initializer_range fuse_norm fuse_swiglu "
        "fuse_cross_entropy fuse_linear_cross_entropy use_l2warp vocab_size attnres_block_size",
        attn_mode="fused_recurrent",
        expand_ratio=1,
        use_short_conv=False,
        use_lower_bound=True,
    ),
    mixer="fla.layers.hgrn:HGRNAttention",
    mixer_args="mode=attn_mode hidden_size expand_ratio use_short_conv conv_size elementwise_affine norm_eps",
    block="fla.models.lower_bounds:LowerBoundBlock",
    model="fla.models.lower_bounds:ExpandedLowerBoundModel",
)

__getattr__, __dir__, __all__ = FAMILY.exports()
