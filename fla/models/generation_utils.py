# SPDX-License-Identifier: MIT
"""``generate`` of transformers 4.45 to 5.x on caches of this package."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from fla.models._compat import CACHE_FIELD, GenerationMixin, HFCache, parameters_of
from fla.models.cache_utils import Cache, FLACache

__all__ = ["FLAGenerationMixin", "FLAUnsupportedCacheGenerationMixin", "own_cache", "renamed_keyword", "resolve_cache"]


def resolve_cache(past_key_values: Any, kwargs: dict[str, Any]) -> Any:
    """The cache, which transformers calls ``cache`` since 5.24 and ``past_key_values`` before.

    Removes ``cache`` from ``kwargs``: falling through unnoticed, it would make every decoding step forget its past.

    Raises:
        ValueError: both names with different objects.
    """
    cache = kwargs.pop("cache", None)
    if cache is None or cache is past_key_values:
        return past_key_values
    if past_key_values is not None:
        raise ValueError("`past_key_values` and `cache` are two names of one argument; give one of them.")
    return cache


def own_cache(past_key_values: Any) -> FLACache:
    """A cache of this package from what the caller passed.

    Raises:
        TypeError: a cache of transformers that is static or holds states already.
    """
    if isinstance(past_key_values, FLACache):
        return past_key_values
    if not isinstance(past_key_values, HFCache):
        return Cache.from_legacy_cache(past_key_values)
    kind = type(past_key_values).__name__
    if isinstance(past_key_values, StaticCache):
        raise TypeError(
            f"`past_key_values` must be a fla.models.utils.Cache; a {kind} holds keys and values, of which there are "
            "none here. The recurrent state has a fixed size anyway."
        )
    # generate of some versions passes a fresh cache of its own, which could not hold recurrent states.
    if past_key_values.get_seq_length() == 0:
        return Cache()
    raise TypeError(f"`past_key_values` must be a fla.models.utils.Cache; the states of a {kind} cannot be used.")


def renamed_keyword(kwargs: dict[str, Any], old: str, new: str, value: Any, unset: Any) -> Any:
    """``value``, or what was given under the ``old`` name of a keyword.

    Raises:
        ValueError: both names given.
    """
    if old not in kwargs:
        return value
    given = kwargs.pop(old)
    if value is not unset and value != unset:
        raise ValueError(f"`{old}` is the old name of `{new}`; give one of them.")
    warnings.warn(f"`{old}` is deprecated; use `{new}`.", DeprecationWarning, stacklevel=3)
    return given


def _positions(
    input_ids: Tensor | None, inputs_embeds: Tensor | None, count: int | None, given: Tensor | None
) -> Tensor | None:
    """Positions of the new tokens, which transformers 4 slices by."""
    tokens = input_ids if input_ids is not None and input_ids.shape[1] else inputs_embeds
    if given is not None or tokens is None:
        return given
    length = tokens.shape[1]
    return torch.arange(0 if count is None else length - count, length, device=tokens.device)


def _prepare_inputs(
    input_ids: Tensor, *, cache_position: Tensor, inputs_embeds: Tensor | None, past_key_values: Any, **kwargs: Any
) -> dict[str, Any]:
    """What :meth:`GenerationMixin.prepare_inputs_for_generation` does in later versions."""
    new = cache_position.shape[0]
    if inputs_embeds is not None and input_ids.shape[1] < new:
        inputs: dict[str, Any] = {"inputs_embeds": inputs_embeds}
        if input_ids.shape[1]:  # without a cache, the tokens generated so far follow the prompt
            raise NotImplementedError("`inputs_embeds` without a cache needs transformers 4.46 or newer.")
    else:
        inputs = {"input_ids": input_ids[:, -new:].contiguous()}
    return {**inputs, "past_key_values": past_key_values, **kwargs}


class FLAGenerationMixin(GenerationMixin):
    """Generation for models that create their own cache."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        # transformers would create an attention cache; the model creates its own in the first forward pass.
        return False

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers. The cache may be given as ``past_key_values`` or ``cache``, whatever the version.

        ``cache_implementation="static"`` keeps the states where they are, see :class:`fla.decoding.StaticDecode`: on
        CUDA devices every step after the prompt is one graph. Without it that begins after some steps where it
        :func:`~fla.decoding.suits` the model, but not with ``cache_implementation="dynamic"``.
        """
        cache = resolve_cache(kwargs.pop("past_key_values", None), kwargs)
        if cache is None:
            from fla.decoding import cache_for

            config = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
            cache = cache_for(self, config or getattr(self, "generation_config", None), kwargs)
        if cache is None:
            return super().generate(*args, **kwargs)
        try:
            return super().generate(*args, **{**kwargs, CACHE_FIELD: own_cache(cache)})
        finally:
            getattr(cache, "leave", bool)()

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool = True,
        logits_to_keep: int | Tensor | None = None,
        cache_position: Tensor | None = None,
        next_sequence_length: int | None = None,
        is_first_iteration: bool = False,
        cache: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Inputs of the next forward pass.

        Args:
            input_ids: all tokens so far ``[B, T]``; only the new ones go on once there is a cache.
            attention_mask: padding mask ``[B, T]`` of the whole length, passed on as it is.
            cache_position: positions of the new tokens (transformers 4); their number is what counts.
            next_sequence_length: number of new tokens (transformers 5).
            cache: another name of ``past_key_values``. Spelled out because ``generate`` looks for it here when it
                checks the keywords of its caller.
        """
        past_key_values = resolve_cache(past_key_values, {"cache": cache})
        logits_to_keep = renamed_keyword(kwargs, "num_logits_to_keep", "logits_to_keep", logits_to_keep, None)
        if logits_to_keep is not None:
            kwargs["logits_to_keep"] = logits_to_keep
        parent = super().prepare_inputs_for_generation
        dialect = parameters_of(parent)
        kwargs["cache" if "cache" in dialect else "past_key_values"] = past_key_values
        if "next_sequence_length" in dialect:
            if next_sequence_length is None and cache_position is not None:
                next_sequence_length = cache_position.shape[0]
            kwargs.update(next_sequence_length=next_sequence_length, is_first_iteration=is_first_iteration)
        else:
            kwargs["cache_position"] = _positions(input_ids, inputs_embeds, next_sequence_length, cache_position)
            if "inputs_embeds" not in dialect:  # transformers 4.45 left it to every model
                parent = _prepare_inputs
        inputs = parent(
            input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, use_cache=use_cache, **kwargs
        )
        inputs.pop("cache_position", None)
        return inputs


class FLAUnsupportedCacheGenerationMixin(FLAGenerationMixin):
    """Generation for models whose states cannot do all that an attention cache can."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; strategies that manipulate the cache get a readable error."""
        try:
            return super().generate(*args, **kwargs)
        except AttributeError as error:
            # Contrastive search and the like reach into the cache.
            if "past_key_values" in str(error):
                raise AttributeError(
                    f"This generation strategy manipulates `past_key_values`, which is not supported for "
                    f"{type(self).__name__}. Try another strategy; its name is in the error above."
                ) from error
            raise
