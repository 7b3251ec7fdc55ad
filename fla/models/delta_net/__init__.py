# SPDX-License-Identifier: MIT
"""DeltaNet models (https://arxiv.org/abs/2406.06484)."""

from __future__ import annotations

from fla.models.family import TAIL, Family, config_fields

FAMILY = Family(
    stem="DeltaNet",
    model_type="delta_net",
    package="delta_net",
    # `use_output_norm` is in configurations of the reference and means nothing there either.
    fields=config_fields(
        "attn_mode hidden_size expand_k=1.0 expand_v=1.0 use_gate=False use_short_conv=True allow_neg_eigval=False "
        "conv_size use_beta=True use_output_norm=True num_heads=16 qk_norm='l2' qk_activation='silu' "
        "max_position_embeddings hidden_ratio intermediate_size hidden_act num_hidden_layers norm_eps attn " + TAIL
    ),
    mixer="fla.layers.delta_net:DeltaNet",
    mixer_args="mode=attn_mode hidden_size expand_k expand_v num_heads use_beta use_gate use_short_conv conv_size "
    "allow_neg_eigval qk_activation qk_norm norm_eps",
)

__getattr__, __dir__, __all__ = FAMILY.exports()
