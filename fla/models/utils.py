# SPDX-License-Identifier: MIT
"""Caches and generation mixins, under the path that existing code imports them from."""

from fla.models.cache_utils import Cache, FLACache, FLALayer, LegacyFLACache
from fla.models.generation_utils import FLAGenerationMixin, FLAUnsupportedCacheGenerationMixin

__all__ = [
    "Cache",
    "FLACache",
    "FLAGenerationMixin",
    "FLALayer",
    "FLAUnsupportedCacheGenerationMixin",
    "LegacyFLACache",
]
