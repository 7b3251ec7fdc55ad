# SPDX-License-Identifier: MIT
"""Gated DeltaNet models (https://arxiv.org/abs/2412.06464)."""

from __future__ import annotations

from fla.models.family import Family, config_fields

FAMILY = Family(
    stem="GatedDeltaNet",
    model_type="gated_deltanet",
    package="gated_deltanet",
    fields=config_fields(
        "attn_mode hidden_size expand_v=2.0 use_gate=True use_short_conv=True allow_neg_eigval=False conv_size "
        "head_dim=256 num_heads=6 num_v_heads=None max_position_embeddings hidden_ratio intermediate_size hidden_act "
        "num_hidden_layers=21 norm_eps attn use_cache pad_token_id bos_token_id eos_token_id tie_word_embeddings "
        "initializer_range fuse_norm fuse_swiglu fuse_cross_entropy fuse_linear_cross_entropy use_l2warp vocab_size "
        "attnres_block_size output_gate_activation='swish'"
    ),
    mixer="fla.layers.gated_deltanet:GatedDeltaNet",
    mixer_args="mode=attn_mode hidden_size expand_v head_dim num_heads num_v_heads use_gate use_short_conv "
    "allow_neg_eigval conv_size norm_eps output_gate_activation",
)

__getattr__, __dir__, __all__ = FAMILY.exports()
