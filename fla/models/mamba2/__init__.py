# SPDX-License-Identifier: MIT
"""Mamba2: models of state space duality (https://arxiv.org/abs/2405.21060)."""

from __future__ import annotations

from typing import Any

from fla.models.family import Family, config_fields


def _finish(values: dict[str, Any], loaded: bool) -> None:
    for name in ("A_init_range", "dt_limit"):
        low, high = values[name] = tuple(values[name])  # a list after a trip through JSON
        if not 0 <= low <= high or (name == "A_init_range" and low == 0):
            raise ValueError(f"`{name}` must be an increasing pair of positive numbers, got {values[name]}.")
    if not 0 < values["dt_min"] <= values["dt_max"] or values["dt_init_floor"] < 0:
        raise ValueError(
            "`dt_min`, `dt_max` and `dt_init_floor` must satisfy 0 < dt_min <= dt_max and dt_init_floor >= 0, got "
            f"{values['dt_min']}, {values['dt_max']} and {values['dt_init_floor']}."
        )
    values["num_heads"] = int(values["expand"] * values["hidden_size"] / values["head_dim"])


FAMILY = Family(
    stem="Mamba2",
    model_type="mamba2",
    package="mamba2",
    fields=config_fields(
        "head_dim=64 vocab_size hidden_size state_size=128 num_hidden_layers=48 norm_eps=1e-05 pad_token_id=0 "
        "bos_token_id eos_token_id expand=2 conv_kernel=4 n_groups=1 use_bias=False use_conv_bias=True conv_init=None "
        "A_init_range=(1,16) D_has_hdim=False hidden_act='silu' initializer_range residual_in_fp32=True dt_min=0.001 "
        "dt_max=0.1 dt_init_floor=0.0001 dt_limit=(0.0,1e999) rescale_prenorm_residual=True use_cache rmsnorm=True "
        "norm_before_gate=False chunk_size=256 fuse_norm fuse_cross_entropy fuse_linear_cross_entropy use_l2warp "
        "tie_word_embeddings"
    ),
    mixer="fla.layers.mamba2:Mamba2",
    mixer_args="num_heads head_dim hidden_size state_size expand n_groups conv_kernel conv_init use_conv_bias "
    "hidden_act A_init_range D_has_hdim rmsnorm norm_before_gate dt_min dt_max dt_init_floor dt_limit use_bias "
    "norm_eps chunk_size",
    finish=_finish,
    prefix="backbone",
    final_norm="norm_f",
    block="fla.models.mamba:MambaBlock",
    model="fla.models.mamba:MambaModel",
    generation="plain",
)

__getattr__, __dir__, __all__ = FAMILY.exports()
