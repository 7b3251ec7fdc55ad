# SPDX-License-Identifier: MIT
"""RetNet: models of retention (https://arxiv.org/abs/2307.08621)."""

from __future__ import annotations

from fla.models.family import Family, config_fields

FAMILY = Family(
    stem="RetNet",
    model_type="retnet",
    package="retnet",
    fields=config_fields(
        "attn_mode hidden_size expand_k expand_v hidden_ratio intermediate_size num_hidden_layers num_heads "
        "num_kv_heads feature_map hidden_act use_short_conv conv_size use_output_gate max_position_embeddings "
        "elementwise_affine norm_eps attn use_cache pad_token_id bos_token_id eos_token_id tie_word_embeddings "
        "initializer_range fuse_norm fuse_swiglu fuse_cross_entropy fuse_linear_cross_entropy use_l2warp vocab_size "
        "attnres_block_size",
        expand_k=1.0,
        expand_v=2.0,
        hidden_ratio=2,
        num_heads=8,
        num_kv_heads=None,
        feature_map=None,
        use_short_conv=False,
        use_output_gate=True,
    ),
    mixer="fla.layers.multiscale_retention:MultiScaleRetention",
    mixer_args="mode=attn_mode hidden_size expand_k expand_v num_heads num_kv_heads feature_map use_short_conv "
    "conv_size use_output_gate gate_fn=hidden_act elementwise_affine norm_eps fuse_norm",
)

__getattr__, __dir__, __all__ = FAMILY.exports()
