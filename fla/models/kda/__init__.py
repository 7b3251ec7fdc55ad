# SPDX-License-Identifier: MIT
"""KDA: models of Kimi Delta Attention (Kimi Linear, https://arxiv.org/abs/2510.26692)."""

from __future__ import annotations

from typing import Any

from fla.models.family import Family, config_fields


def _finish(values: dict[str, Any], loaded: bool) -> None:
    if values["safe_gate"] and values["lower_bound"] is None:
        raise ValueError("`safe_gate=True` needs a `lower_bound`; -5 is recommended.")


FAMILY = Family(
    stem="KDA",
    model_type="kda",
    package="kda",
    fields=config_fields(
        "attn_mode hidden_size expand_v=1.0 use_short_conv=True allow_neg_eigval=False safe_gate=False "
        "lower_bound=None conv_size head_dim=128 num_heads=16 num_v_heads=None max_position_embeddings hidden_ratio "
        "intermediate_size hidden_act num_hidden_layers norm_eps attn use_cache pad_token_id bos_token_id "
        "eos_token_id tie_word_embeddings initializer_range fuse_norm fuse_swiglu fuse_cross_entropy use_l2warp "
        "vocab_size attnres_block_size"
    ),
    mixer="fla.layers.kda:KimiDeltaAttention",
    mixer_args="mode=attn_mode hidden_size expand_v head_dim num_heads num_v_heads use_short_conv allow_neg_eigval "
    "safe_gate lower_bound conv_size norm_eps",
    finish=_finish,
    linear_loss="fuse_cross_entropy",
)

__getattr__, __dir__, __all__ = FAMILY.exports()
