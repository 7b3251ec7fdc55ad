# SPDX-License-Identifier: MIT
"""Samba: models of Mamba and sliding window attention in turn (https://arxiv.org/abs/2406.07522)."""

from __future__ import annotations

from typing import Any

from fla.models.family import Family, config_fields

PLAN = {
    "layers": [1, 3, 5, 7, 9, 11, 13, 15, 17],
    "num_heads": 18,
    "num_kv_heads": 18,
    "qkv_bias": False,
    "window_size": 2048,
    "rope_theta": 10000.0,
}


def _finish(values: dict[str, Any], loaded: bool) -> None:
    # The usual plan fits models of fewer layers too; a plan of one's own is taken as it is.
    attn = values["attn"]
    if attn is PLAN or (loaded and attn == PLAN):
        values["attn"] = {**PLAN, "layers": [i for i in PLAN["layers"] if i < values["num_hidden_layers"]]}  # type: ignore[attr-defined]
    values["intermediate_size"] = int(values["expand"] * values["hidden_size"])


FAMILY = Family(
    stem="Samba",
    model_type="samba",
    package="samba",
    fields=config_fields(
        "hidden_size=2304 state_size=16 num_hidden_layers=18 norm_eps=1e-05 pad_token_id=0 bos_token_id eos_token_id "
        "expand=2 conv_kernel=4 use_bias=False use_conv_bias=True hidden_act initializer_range residual_in_fp32=False "
        "time_step_rank='auto' time_step_scale=1.0 time_step_min=0.001 time_step_max=0.1 "
        "time_step_init_scheme='random' time_step_floor=0.0001 max_position_embeddings attn hidden_ratio "
        "rescale_prenorm_residual=False use_cache fuse_norm fuse_swiglu fuse_cross_entropy fuse_linear_cross_entropy "
        "use_l2warp vocab_size tie_word_embeddings attnres_block_size",
        attn=PLAN,
    ),
    mixer="fla.layers.mamba:Mamba",
    mixer_args="hidden_size state_size conv_kernel use_conv_bias intermediate_size dt_rank=time_step_rank "
    "dt_min=time_step_min dt_max=time_step_max dt_init=time_step_init_scheme dt_scale=time_step_scale "
    "dt_init_floor=time_step_floor use_bias hidden_act",
    finish=_finish,
    prefix="backbone",
    final_norm="norm_f",
    block="fla.models.mamba:SambaBlock",
    model="fla.models.mamba:MambaModel",
    generation="plain",
)

__getattr__, __dir__, __all__ = FAMILY.exports()
