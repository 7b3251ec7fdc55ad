# SPDX-License-Identifier: MIT
"""RetNet: models of retention (https://arxiv.org/abs/2307.08621)."""

from __future__ import annotations

from fla.models.family import TAIL, Family, config_fields

FAMILY = Family(
    stem="RetNet",
    model_type="retnet",
    package="retnet",
    fields=config_fields(
        "attn_mode hidden_size expand_k=1.0 expand_v=2.0 hidden_ratio=2 intermediate_size num_hidden_layers "
        "num_heads=8 num_kv_heads=None feature_map=None hidden_act use_short_conv=False conv_size "
        "use_output_gate=True max_position_embeddings elementwise_affine norm_eps attn " + TAIL
    ),
    mixer="fla.layers.multiscale_retention:MultiScaleRetention",
    mixer_args="mode=attn_mode hidden_size expand_k expand_v num_heads num_kv_heads feature_map use_short_conv "
    "conv_size use_output_gate gate_fn=hidden_act elementwise_affine norm_eps fuse_norm",
)

__getattr__, __dir__, __all__ = FAMILY.exports()
