# SPDX-License-Identifier: MIT
"""Llama, Mistral and Qwen2, which our Transformer computes as they do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fla.convert._mapping import Conversion, ConversionError, Entry

__all__ = ["LLAMA"]

_FIELDS = {  # ours -> theirs
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
    "tie_word_embeddings": "tie_word_embeddings",
    "initializer_range": "initializer_range",
    "pad_token_id": "pad_token_id",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
}


def _entries(config: Mapping[str, Any]) -> Sequence[Entry]:
    ours, theirs = "model.layers.{i}", "model.layers.{i}"
    rows = [
        Entry("model.embeddings.weight", "model.embed_tokens.weight"),
        Entry(f"{ours}.attn_norm.weight", f"{theirs}.input_layernorm.weight"),
        Entry(f"{ours}.mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight"),
        Entry("model.norm.weight", "model.norm.weight"),
        Entry("lm_head.weight", "lm_head.weight", optional=bool(config.get("tie_word_embeddings"))),
    ]
    rows += [Entry(f"{ours}.attn.{n}_proj.weight", f"{theirs}.self_attn.{n}_proj.weight") for n in "qkvo"]
    rows += [
        Entry(f"{ours}.attn.{n}_proj.bias", f"{theirs}.self_attn.{n}_proj.bias", optional=not _qkv_bias(config))
        for n in "qkv"
    ]
    rows += [Entry(f"{ours}.mlp.{n}_proj.weight", f"{theirs}.mlp.{n}_proj.weight") for n in ("gate", "up", "down")]
    return rows


def _qkv_bias(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == "qwen2"


def _config(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    heads = config["num_attention_heads"]
    refused = {
        "attention_bias": config.get("attention_bias"),
        "mlp_bias": config.get("mlp_bias"),
        "hidden_act": None if config.get("hidden_act", "silu") in ("silu", "swish") else config["hidden_act"],
        "head_dim": None if (config.get("head_dim") or 0) * heads in (0, config["hidden_size"]) else config["head_dim"],
        "rope_scaling": None if rope.get("rope_type", rope.get("type", "default")) == "default" else rope,
        "partial_rotary_factor": None if rope.get("partial_rotary_factor", 1) == 1 else rope["partial_rotary_factor"],
    }
    for name, value in refused.items():
        if value:
            raise ConversionError(f"the Transformer family cannot compute `{name}` = {value!r}")
    # Qwen2 says in another field whether its window counts.
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    return {
        **{ours: config[theirs] for ours, theirs in _FIELDS.items() if theirs in config},
        "qkv_bias": _qkv_bias(config),
        "rope_theta": config.get("rope_theta") or rope.get("rope_theta", 10000.0),
        "window_size": window,
    }


def _back(config: Any) -> dict[str, Any]:
    if config.qk_norm:
        raise ConversionError("none of these models has `qk_norm` = True")
    if config.window_size is not None and config.qkv_bias:
        raise ConversionError("none of these models has both `window_size` and `qkv_bias`")
    kind = "qwen2" if config.qkv_bias else "llama" if config.window_size is None else "mistral"
    fields = {theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()}
    fields["num_key_value_heads"] = config.num_kv_heads or config.num_heads
    fields |= {"model_type": kind, "hidden_act": "silu", "rope_theta": config.rope_theta}
    return {**fields, "sliding_window": config.window_size} if kind == "mistral" else fields


LLAMA = Conversion(
    model_types=("llama", "mistral", "qwen2"),
    family="transformer",
    entries=_entries,
    config=_config,
    back=_back,
    ignored=r"rotary_emb\.inv_freq$",
)
