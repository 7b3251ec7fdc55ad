# SPDX-License-Identifier: MIT
"""GSA: models of gated slot attention (https://arxiv.org/abs/2409.07146)."""

from __future__ import annotations

from fla.models.family import Family, config_fields

# The reference misspells two parameters and names the attributes right; both are accepted.
FAMILY = Family(
    stem="GSA",
    model_type="gsa",
    package="gsa",
    fields=config_fields(
        "hidden_size gate_logit_normalizer=8 clamp_min=None clamp_max=None hidden_ratio intermediate_size "
        "num_hidden_layers num_heads=4 num_kv_heads=None num_slots=64 use_short_conv=False conv_size exapnd_k=1 "
        "exapnd_v=1 feature_map='swish' use_output_gate=False use_norm=True max_position_embeddings hidden_act "
        "elementwise_affine norm_eps attn use_cache pad_token_id bos_token_id eos_token_id initializer_range "
        "tie_word_embeddings fuse_norm fuse_swiglu fuse_cross_entropy fuse_linear_cross_entropy use_l2warp vocab_size "
        "attnres_block_size"
    ),
    aliases={"exapnd_k": "expand_k", "exapnd_v": "expand_v"},
    mixer="fla.layers.gsa:GatedSlotAttention",
    mixer_args="hidden_size expand_k expand_v num_heads num_kv_heads num_slots use_short_conv conv_size feature_map "
    "use_output_gate use_norm gate_logit_normalizer elementwise_affine norm_eps",
)

__getattr__, __dir__, __all__ = FAMILY.exports()
