# SPDX-License-Identifier: MIT
"""GLA: models of gated linear attention (https://arxiv.org/abs/2312.06635)."""

from __future__ import annotations

from fla.models.family import TAIL, Family, config_fields

FAMILY = Family(
    stem="GLA",
    model_type="gla",
    package="gla",
    fields=config_fields(
        "hidden_size expand_k=0.5 expand_v=1.0 hidden_ratio intermediate_size num_hidden_layers num_heads=4 "
        "num_kv_heads=None feature_map=None attn_mode use_short_conv=False conv_size use_output_gate=True "
        "clamp_min=None hidden_act max_position_embeddings elementwise_affine norm_eps use_gk=True use_gv=False attn "
        + TAIL
    ),
    mixer="fla.layers.gla:GatedLinearAttention",
    mixer_args="mode=attn_mode hidden_size expand_k expand_v num_heads num_kv_heads feature_map use_short_conv "
    "conv_size use_output_gate gate_fn=hidden_act elementwise_affine norm_eps clamp_min fuse_norm",
)

__getattr__, __dir__, __all__ = FAMILY.exports()
