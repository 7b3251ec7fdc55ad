# SPDX-License-Identifier: MIT
"""What changed between transformers 4.45 and 5.x, in one place."""

from __future__ import annotations

import inspect
from typing import Any

import transformers
from packaging.version import Version
from transformers import PreTrainedModel
from transformers.cache_utils import Cache as HFCache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

try:  # 5.0 renamed it and keeps the old name for a while
    from transformers import PreTrainedConfig
except ImportError:
    from transformers import PretrainedConfig as PreTrainedConfig

try:
    from transformers import GenerationMixin
except ImportError:
    from transformers.generation import GenerationMixin

try:  # 4.54
    from transformers.cache_utils import CacheLayerMixin
except ImportError:
    CacheLayerMixin = object  # type: ignore[assignment,misc]

__all__ = [
    "CACHE_FIELD",
    "BaseModelOutputWithPast",
    "CacheLayerMixin",
    "CausalLMOutputWithPast",
    "GenerationMixin",
    "HFCache",
    "PreTrainedConfig",
    "PreTrainedModel",
    "checkpointing_layer",
    "parameters_of",
    "tied_weights",
]

VERSION = Version(transformers.__version__)

CACHE_FIELD = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""Field of the outputs that holds the cache; 5.24 renamed it."""


def parameters_of(function: Any) -> frozenset[str]:
    """Parameter names of a transformers method, to see which of its dialects it speaks."""
    return frozenset(inspect.signature(function).parameters)


def tied_weights(head: str, embeddings: str) -> Any:
    """``_tied_weights_keys``: a list of tied keys, since 5.0 a mapping to what they are tied to."""
    return {head: embeddings} if VERSION.major >= 5 else [head]


def checkpointing_layer() -> Any:
    """Base class of blocks that gradient checkpointing wraps; transformers has one since 4.53."""
    try:
        from transformers import modeling_layers
    except ImportError:
        from fla.models import modeling_layers  # type: ignore[no-redef]
    return modeling_layers.GradientCheckpointingLayer
