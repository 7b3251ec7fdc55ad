# SPDX-License-Identifier: MIT
"""RWKV6: models of RWKV-6, Finch (https://arxiv.org/abs/2404.05892)."""

from __future__ import annotations

from fla.models.family import Family, config_fields

FAMILY = Family(
    stem="RWKV6",
    model_type="rwkv6",
    package="rwkv6",
    fields=config_fields(
        "attn_mode hidden_size expand_k=0.5 expand_v=1.0 hidden_ratio=3.5 intermediate_size num_hidden_layers "
        "num_heads=4 proj_low_rank_dim=32 gate_low_rank_dim=64 hidden_act='sqrelu' max_position_embeddings "
        "norm_first=True norm_bias=True norm_eps=1e-05 attn use_cache pad_token_id bos_token_id eos_token_id "
        "tie_word_embeddings initializer_range fuse_norm fuse_cross_entropy fuse_linear_cross_entropy use_l2warp "
        "vocab_size"
    ),
    mixer="fla.layers.rwkv6:RWKV6Attention",
    mixer_args="mode=attn_mode hidden_size expand_k expand_v num_heads proj_low_rank_dim gate_low_rank_dim norm_eps "
    "fuse_norm",
    block="fla.models.rwkv:RWKV6Block",
    model="fla.models.rwkv:RWKVModel",
)

__getattr__, __dir__, __all__ = FAMILY.exports()
