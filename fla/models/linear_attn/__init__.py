# SPDX-License-Identifier: MIT
"""LinearAttention: models of linear attention with a feature map (https://arxiv.org/abs/2006.16236)."""

from __future__ import annotations

from fla.models.family import Family, config_fields

FAMILY = Family(
    stem="LinearAttention",
    model_type="linear_attn",
    package="linear_attn",
    fields=config_fields(
        "attn_mode hidden_size expand_k expand_v hidden_ratio intermediate_size num_hidden_layers num_heads "
        "num_kv_heads feature_map tie_feature_map_qk norm_q norm_k norm_feature_map hidden_act "
        "max_position_embeddings elementwise_affine norm_eps attn use_cache pad_token_id bos_token_id eos_token_id "
        "tie_word_embeddings initializer_range fuse_norm fuse_swiglu fuse_cross_entropy fuse_linear_cross_entropy "
        "use_l2warp vocab_size attnres_block_size",
        attn_mode="fused_chunk",
        expand_k=1.0,
        expand_v=1.0,
        num_heads=4,
        num_kv_heads=None,
        feature_map="elementwise_product",
        tie_feature_map_qk=False,
        norm_q=False,
        norm_k=False,
        norm_feature_map=False,
    ),
    mixer="fla.layers.linear_attn:LinearAttention",
    mixer_args="mode=attn_mode hidden_size expand_k expand_v num_heads num_kv_heads feature_map tie_feature_map_qk "
    "norm_q norm_k do_feature_map_norm=norm_feature_map elementwise_affine norm_eps",
)

__getattr__, __dir__, __all__ = FAMILY.exports()
