# SPDX-License-Identifier: MIT
"""HGRN2: models of gated linear recurrence with state expansion (https://arxiv.org/abs/2404.07904)."""

from __future__ import annotations

from fla.models.family import Family, config_fields

FAMILY = Family(
    stem="HGRN2",
    model_type="hgrn2",
    package="hgrn2",
    fields=config_fields(
        "hidden_size num_hidden_layers attn_mode num_heads expand_ratio use_short_conv conv_size use_lower_bound "
        "hidden_ratio intermediate_size hidden_act max_position_embeddings elementwise_affine norm_eps attn use_cache "
        "pad_token_id bos_token_id eos_token_id tie_word_embeddings initializer_range fuse_norm fuse_swiglu "
        "fuse_cross_entropy fuse_linear_cross_entropy use_l2warp vocab_size attnres_block_size",
        num_heads=None,
        expand_ratio=128,
        use_short_conv=False,
        use_lower_bound=True,
    ),
    mixer="fla.layers.hgrn2:HGRN2Attention",
    mixer_args="mode=attn_mode hidden_size num_heads expand_ratio use_short_conv conv_size elementwise_affine norm_eps",
    block="fla.models.lower_bounds:LowerBoundBlock",
    model="fla.models.lower_bounds:LowerBoundModel",
)

__getattr__, __dir__, __all__ = FAMILY.exports()
