# SPDX-License-Identifier: MIT
"""LinearAttention: models of linear attention with a feature map (https://arxiv.org/abs/2006.16236)."""

from __future__ import annotations

from fla.models.family import TAIL, Family, config_fields

FAMILY = Family(
    stem="LinearAttention",
    model_type="linear_attn",
    package="linear_attn",
    fields=config_fields(
        "attn_mode='fused_chunk' hidden_size expand_k=1.0 expand_v=1.0 hidden_ratio intermediate_size "
        "num_hidden_layers num_heads=4 num_kv_heads=None feature_map='elementwise_product' tie_feature_map_qk=False "
        "norm_q=False norm_k=False norm_feature_map=False hidden_act max_position_embeddings elementwise_affine "
        "norm_eps attn " + TAIL
    ),
    mixer="fla.layers.linear_attn:LinearAttention",
    mixer_args="mode=attn_mode hidden_size expand_k expand_v num_heads num_kv_heads feature_map tie_feature_map_qk "
    "norm_q norm_k do_feature_map_norm=norm_feature_map elementwise_affine norm_eps",
)

__getattr__, __dir__, __all__ = FAMILY.exports()
