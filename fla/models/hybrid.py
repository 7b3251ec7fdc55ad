# SPDX-License-Identifier: MIT
"""Older names of the hybrid attention configuration."""

from fla.models.attention_config import AttentionConfig as HybridAttentionConfig
from fla.models.attention_config import get_attention_spec as get_hybrid_attention_spec
from fla.models.attention_config import parse_attention_config as normalize_hybrid_attention_config

__all__ = ["HybridAttentionConfig", "get_hybrid_attention_spec", "normalize_hybrid_attention_config"]
