# SPDX-License-Identifier: MIT
"""RWKV-6 as its authors publish it for transformers (``RWKV/rwkv-6-world-...``)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fla.convert._mapping import Conversion, ConversionError, Entry

__all__ = ["RWKV6"]

_THEIRS = "wkvrg"  # order of the five mixtures
_OURS = "rwkvg"
_TAKE = [_THEIRS.index(n) for n in _OURS]
_PUT = [_OURS.index(n) for n in _THEIRS]


def _transpose(x: Tensor) -> Tensor:
    return x.T.contiguous()


def _reorder_rows(order: Sequence[int], x: Tensor) -> Tensor:
    """``[5 R, D]`` with its five blocks in another order."""
    return x.unflatten(0, (5, -1))[list(order)].flatten(0, 1)


def _norm_ratio(config: Mapping[str, Any]) -> float:
    """Their last norm has an epsilon of its own, larger than that of the others by this number squared."""
    return float(config.get("head_size_divisor", 8))


def _entries(config: Mapping[str, Any]) -> Sequence[Entry]:
    ours, theirs = "model.layers.{i}", "rwkv.blocks.{i}"
    attn, att = f"{ours}.attn", f"{theirs}.attention"
    ffn, feed = f"{ours}.ffn", f"{theirs}.feed_forward"
    D = config["hidden_size"]
    inner = config.get("attention_hidden_size") or D
    head = config.get("head_size", 64)
    ratio = _norm_ratio(config)

    def vector(x: Tensor) -> Tensor:
        return x.reshape(-1)

    def broadcast(x: Tensor) -> Tensor:
        return x.reshape(1, 1, -1)

    rows = [
        Entry("model.embeddings.weight", "rwkv.embeddings.weight"),
        Entry("lm_head.weight", "head.weight"),
        Entry(f"{attn}.x_proj.0.mu", f"{att}.time_maa_x", vector, broadcast),
        Entry(
            f"{attn}.x_proj.0.linear.weight",
            f"{att}.time_maa_w1",
            lambda x: _reorder_rows(_TAKE, _transpose(x)),
            lambda x: _transpose(_reorder_rows(_PUT, x)),
        ),
        Entry(
            f"{attn}.x_proj.2.weight",
            f"{att}.time_maa_w2",
            lambda x: x[_TAKE].permute(2, 0, 1).flatten(1),
            lambda x: x.unflatten(1, (5, -1)).permute(1, 2, 0)[_PUT].contiguous(),
        ),
        Entry(
            f"{attn}.x_bias",
            tuple(f"{att}.time_maa_{n}" for n in _OURS),
            lambda *xs: torch.stack([vector(x) for x in xs]),
            lambda x: [broadcast(row).clone() for row in x],
        ),
        Entry(
            f"{attn}.bonus",
            f"{att}.time_faaaa",
            lambda x: x.reshape(inner // head, head),
            lambda x: x.reshape(inner // head, head),
        ),
        Entry(f"{attn}.w_proj.linear.lora.0.weight", f"{att}.time_decay_w1", _transpose, _transpose),
        Entry(f"{attn}.w_proj.linear.lora.2.weight", f"{att}.time_decay_w2", _transpose, _transpose),
        Entry(f"{attn}.w_proj.linear.lora.2.bias", f"{att}.time_decay", vector, broadcast),
        Entry(f"{attn}.r_proj.linear.weight", f"{att}.receptance.weight"),
        Entry(f"{attn}.k_proj.linear.weight", f"{att}.key.weight"),
        # A norm of v / ratio with epsilon e is a norm of v with epsilon e * ratio ** 2.
        Entry(f"{attn}.v_proj.linear.weight", f"{att}.value.weight", lambda x: x / ratio, lambda x: x * ratio),
        Entry(f"{attn}.g_proj.linear.weight", f"{att}.gate.weight"),
        Entry(f"{attn}.o_proj.weight", f"{att}.output.weight"),
        Entry(f"{ffn}.key.mu", f"{feed}.time_maa_k", vector, broadcast),
        Entry(f"{ffn}.receptance.mu", f"{feed}.time_maa_r", vector, broadcast),
        Entry(f"{ffn}.key.linear.weight", f"{feed}.key.weight"),
        Entry(f"{ffn}.receptance.linear.weight", f"{feed}.receptance.weight"),
        Entry(f"{ffn}.value.weight", f"{feed}.value.weight"),
    ]
    norms = {
        f"{attn}.g_norm": f"{att}.ln_x",
        f"{ours}.attn_norm": f"{theirs}.ln1",
        f"{ours}.ffn_norm": f"{theirs}.ln2",
        "model.layers.0.pre_norm": "rwkv.blocks.0.pre_ln",
        "model.norm": "rwkv.ln_out",
    }
    return rows + [Entry(f"{a}.{part}", f"{b}.{part}") for a, b in norms.items() for part in ("weight", "bias")]


def _config(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    D, L = config["hidden_size"], config["num_hidden_layers"]
    inner, head = config.get("attention_hidden_size") or D, config.get("head_size", 64)
    if inner % head:
        raise ConversionError(f"`head_size` must divide attention_hidden_size = {inner}, got {head}")
    if not math.log2(_norm_ratio(config)).is_integer():
        raise ConversionError(f"`head_size_divisor` must be a power of two, got {config['head_size_divisor']}")
    # The published code derives the ranks from the width, and configurations do not say them.
    block, wide = "rwkv.blocks.0.attention", D >= 4096
    low, gate = tensors.get(f"{block}.time_maa_w1"), tensors.get(f"{block}.time_decay_w1")
    ends = {n: config[n] for n in ("pad_token_id", "bos_token_id", "eos_token_id") if n in config}
    return {
        "hidden_size": D,
        "num_hidden_layers": L,
        "num_heads": inner // head,
        "expand_k": inner / D,
        "expand_v": inner / D,
        "intermediate_size": config.get("intermediate_size") or int(D * 3.5) // 32 * 32,
        "proj_low_rank_dim": (64 if wide else 32) if low is None else low.shape[1] // 5,
        "gate_low_rank_dim": (128 if wide else 64) if gate is None else gate.shape[1],
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "vocab_size": config["vocab_size"],
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
        **ends,
    }


RWKV6 = Conversion(model_types=("rwkv6",), family="rwkv6", entries=_entries, config=_config)
