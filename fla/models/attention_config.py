# SPDX-License-Identifier: MIT
"""The ``attn`` field: which layers of a model are softmax attention, and how they look.

``attn`` is None, one dict, or a list of dicts with ``layers`` (indices, required), ``num_heads`` (required),
``num_kv_heads`` (``num_heads``), ``qkv_bias`` (False), ``window_size`` (None) and ``rope_theta`` (10000). Other keys
are kept.
"""

from __future__ import annotations

import math
from typing import Any, TypedDict

__all__ = ["AttentionConfig", "AttentionSpec", "get_attention_spec", "parse_attention_config"]


class AttentionSpec(TypedDict, total=False):
    """One group of softmax attention layers."""

    layers: list[int]
    num_heads: int
    num_kv_heads: int | None
    qkv_bias: bool
    window_size: int | None
    rope_theta: float


AttentionConfig = AttentionSpec | list[AttentionSpec] | None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _positive(name: str, value: Any, where: str) -> None:
    if not _is_int(value) or value <= 0:
        raise ValueError(f"`{name}` must be a positive int{where}, got {value!r}.")


def _parse_spec(spec: Any, num_layers: int, where: str) -> dict[str, Any]:
    if not isinstance(spec, dict):
        raise ValueError(f"`attn` must be a dict{where}, got {spec!r}.")
    for name in ("layers", "num_heads"):
        if name not in spec:
            raise ValueError(f"`attn` is missing the field `{name}`{where}, got {spec!r}.")
    layers = spec["layers"]
    if not isinstance(layers, (list, tuple)):
        raise ValueError(f"`layers` must be a list or tuple of layer indices{where}, got {layers!r}.")
    for layer in layers:
        if not _is_int(layer):
            raise ValueError(f"`layers` must hold ints{where}, got {layer!r}.")
        if not 0 <= layer < num_layers:
            raise ValueError(f"`layers` must lie in [0, {num_layers}){where}, got {layer}.")
        if list(layers).count(layer) > 1:
            raise ValueError(f"`layers` must not repeat an index{where}, got duplicate {layer}.")
    _positive("num_heads", spec["num_heads"], where)
    kv_heads = spec.get("num_kv_heads")
    kv_heads = spec["num_heads"] if kv_heads is None else kv_heads
    _positive("num_kv_heads", kv_heads, where)
    qkv_bias = spec.get("qkv_bias", False)
    if not isinstance(qkv_bias, bool):
        raise ValueError(f"`qkv_bias` must be a bool{where}, got {qkv_bias!r}.")
    window = spec.get("window_size")
    if window is not None:
        _positive("window_size", window, where)
    theta = spec.get("rope_theta", 10000.0)
    try:
        good = not isinstance(theta, (bool, str)) and math.isfinite(theta) and theta > 0
    except (OverflowError, TypeError):
        good = False
    if not good:
        raise ValueError(f"`rope_theta` must be a positive finite number{where}, got {theta!r}.")
    return {
        **spec,
        "layers": list(layers),
        "num_kv_heads": kv_heads,
        "qkv_bias": qkv_bias,
        "window_size": window,
        "rope_theta": theta,
    }


def parse_attention_config(attn: Any, num_hidden_layers: int) -> Any:
    """``attn`` checked, with defaults filled in, as fresh plain dicts.

    Args:
        attn: None, a dict, or a list (or tuple) of dicts.
        num_hidden_layers: depth of the model.

    Raises:
        ValueError: anything malformed; the message names the field, its value and, in a list, the index.
    """
    if attn is None:
        return None
    if isinstance(attn, dict):
        return _parse_spec(attn, num_hidden_layers, "")
    if not isinstance(attn, (list, tuple)):
        raise ValueError(f"`attn` must be None, a dict or a list of dicts, got {attn!r}.")
    specs = [_parse_spec(spec, num_hidden_layers, f" at index {i}") for i, spec in enumerate(attn)]
    owner: dict[int, int] = {}
    for i, spec in enumerate(specs):
        for layer in spec["layers"]:
            if layer in owner:
                raise ValueError(
                    f"`attn` has a conflicting layer: {layer} is claimed at index {owner[layer]} and at index {i}."
                )
            owner[layer] = i
    return specs


def get_attention_spec(attn: Any, layer_idx: int) -> dict[str, Any] | None:
    """The spec that claims layer ``layer_idx``, or None. ``attn`` is a parsed value or a config that has one."""
    if attn is not None and not isinstance(attn, (dict, list, tuple)):
        attn = attn.attn
    specs = [attn] if isinstance(attn, dict) else attn or []
    return next((spec for spec in specs if layer_idx in spec["layers"]), None)
