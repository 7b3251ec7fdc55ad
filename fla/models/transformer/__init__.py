# SPDX-License-Identifier: MIT
"""Transformer: models of softmax attention with rotary positions, the baseline of the other families."""

from __future__ import annotations

from fla.models.family import Family, config_fields

FAMILY = Family(
    stem="Transformer",
    model_type="transformer",
    package="transformer",
    fields=config_fields(
        "hidden_size num_hidden_layers num_heads=32 num_kv_heads=None qkv_bias=False qk_norm=False window_size=None "
        "rope_theta=10000.0 max_position_embeddings hidden_ratio intermediate_size hidden_act initializer_range "
        "elementwise_affine norm_eps use_cache pad_token_id bos_token_id eos_token_id tie_word_embeddings fuse_norm "
        "fuse_swiglu fuse_cross_entropy fuse_linear_cross_entropy use_l2warp vocab_size attnres_block_size"
    ),
    mixer="fla.layers.attn:Attention",
    mixer_args="hidden_size num_heads num_kv_heads qkv_bias qk_norm window_size rope_theta max_position_embeddings",
    generation="plain",
    cache_first=True,
)

__getattr__, __dir__, __all__ = FAMILY.exports()
