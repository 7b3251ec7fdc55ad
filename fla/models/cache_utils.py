# SPDX-License-Identifier: MIT
"""The cache of a model: per layer, whatever state its mixer carries from token to token.

Every entry has four fields: ``recurrent_state`` (tensors with the sequences on axis 0), ``attn_state`` (tensors with
time on axis 1), ``conv_state`` and ``ffn_state``. Each layer counts its own tokens, so that all layers of one forward
pass see the same past.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fla.models._compat import HFCache
from fla.models.cache_layer import FIELDS, FLALayer, State, first_tensor, map_tensors, take_rows

__all__ = ["Cache", "FLACache", "FLALayer", "LegacyFLACache"]


class FLACache(HFCache):
    """The cache that models of this package read and write: ``cache[layer_idx]`` is the entry of a layer.

    Args:
        seen_tokens: tokens that the layers appended later start counting from.
        kwargs: accepted for callers of older versions; ``offloading=True`` is not supported.
    """

    layer_class_to_replicate = FLALayer
    offloading = False

    def __init__(self, seen_tokens: int = 0, **kwargs: Any) -> None:
        if kwargs.get("offloading"):
            raise NotImplementedError("`offloading=True` is not supported: recurrent states are small.")
        if issubclass(HFCache, torch.nn.Module):  # transformers 4.46 to 4.48
            torch.nn.Module.__init__(self)  # type: ignore[arg-type]
        self.layers: Any = []
        self._initial_tokens = seen_tokens

    def __repr__(self) -> str:
        return f"{type(self).__name__}(layers={self.layers})"

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer_idx: int) -> State | None:
        if not 0 <= layer_idx < len(self.layers):
            raise KeyError(f"The cache has {len(self.layers)} layers, attempted to access layer {layer_idx}.")
        return self.layers[layer_idx].state

    def __iter__(self) -> Iterator[State | None]:
        return (layer.state for layer in self.layers)

    def update(  # type: ignore[override]
        self,
        recurrent_state: Any = None,
        attn_state: Any = None,
        conv_state: Any = None,
        ffn_state: Any = None,
        layer_idx: int = 0,
        offset: int | None = 1,
        cache_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> State:
        """Store the states of layer ``layer_idx``; see :meth:`FLALayer.update`."""
        states = {"recurrent_state": recurrent_state, "attn_state": attn_state, "conv_state": conv_state}
        states |= {"ffn_state": ffn_state, "cache_kwargs": cache_kwargs}
        return self._store(layer_idx, offset, {**kwargs, **states})

    def _store(self, layer_idx: int, offset: int | None, states: dict[str, Any]) -> State:
        while len(self.layers) <= layer_idx:
            layer = FLALayer()
            layer._seen_tokens = self._initial_tokens
            self.layers.append(layer)
        return self.layers[layer_idx].update(offset=1 if offset is None else offset, **states)

    def get_seq_length(self, layer_idx: int | None = 0, cache_position: Any = None) -> int:
        """Tokens that layer ``layer_idx`` has seen; 0 for a layer that does not exist yet."""
        layer_idx = layer_idx or 0
        return self.layers[layer_idx].get_seq_length() if layer_idx < len(self.layers) else 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no maximum."""
        return -1

    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int = 0) -> tuple[int, int]:
        """See :meth:`FLALayer.get_mask_sizes`."""
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else FLALayer()
        return layer.get_mask_sizes(query_length)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Position of the next token."""
        return self.get_seq_length(layer_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether the layer (any layer when None) has a state."""
        if layer_idx is None:
            return any(layer.is_initialized for layer in self.layers)
        return layer_idx < len(self.layers) and self.layers[layer_idx].is_initialized

    def _part(self, field: str, layer_idx: int, state_idx: int) -> Any:
        entry = self[layer_idx] if layer_idx < len(self.layers) else None
        value = None if entry is None else entry[field]
        return value[state_idx] if isinstance(value, (tuple, list)) else value

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        """State of convolution ``state_idx`` of a layer, or None."""
        return self._part("conv_state", layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        """Recurrent state ``state_idx`` of a layer, or None."""
        return self._part("recurrent_state", layer_idx, state_idx)

    def _commit(self, changes: list[Any]) -> None:
        for layer, state in zip(self.layers, changes, strict=True):
            layer.state = state

    def _transform(self, f: Callable[[Tensor], Tensor]) -> None:
        # All layers are computed before any is stored, so that a failure leaves the cache as it was.
        self._commit([map_tensors(layer.state, f) for layer in self.layers])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the sequences ``beam_idx``, as beam search does."""
        self._transform(take_rows(beam_idx))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences ``indices``."""
        self._transform(take_rows(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence ``repeats`` times."""
        self._transform(lambda x: x.repeat_interleave(repeats, 0))

    def crop(self, max_length: int) -> None:
        """See :meth:`FLALayer.crop`. Either every layer is cropped or none."""
        cropped = [layer.cropped(max_length) for layer in self.layers]
        self._commit([state for state, _ in cropped])
        for layer, (_, count) in zip(self.layers, cropped, strict=True):
            layer._seen_tokens = count

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Move a layer's state to the CPU; a windowed layer only when asked."""
        if not (only_non_sliding and self.layers[layer_idx].is_sliding):
            self.layers[layer_idx].offload()

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Move a layer's state back to its device."""
        self.layers[layer_idx].prefetch()

    def reset(self) -> None:
        """Forget all states and counts; the number of layers stays."""
        self._initial_tokens = 0
        for layer in self.layers:
            layer.reset()

    @property
    def seen_tokens(self) -> int:
        """Tokens that the first layer has seen."""
        return self.get_seq_length()

    @property
    def batch_size(self) -> int:
        """Sequences of the first layer that has a state; -1 without any."""
        tensor = next((found for state in self if (found := first_tensor(state)) is not None), None)
        return -1 if tensor is None else tensor.shape[0]

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return any(layer.is_initialized for layer in self.layers)

    def to_legacy_cache(self) -> tuple[State | None, ...]:
        """The entries of all layers."""
        return tuple(self)

    @classmethod
    def from_legacy_cache(cls, past_key_values: Any = None, seen_tokens: int = 0) -> Any:
        """A cache of this class from whatever a caller may hold.

        Args:
            past_key_values: a cache of this class (returned as it is), None, a list or tuple of entries, or an object
                with ``states`` and its own length, such as :class:`LegacyFLACache`.
            seen_tokens: length of the past, for a list or tuple.

        Raises:
            TypeError: anything else.
        """
        legacy = isinstance(past_key_values, LegacyFLACache)
        if isinstance(past_key_values, cls) and legacy is issubclass(cls, LegacyFLACache):
            return past_key_values
        if hasattr(past_key_values, "states"):
            seen_tokens = past_key_values.get_seq_length()
            past_key_values = past_key_values.states
        cache = cls()
        if past_key_values is None:
            return cache
        if not isinstance(past_key_values, (list, tuple)):
            raise TypeError(
                f"`past_key_values` must be a {cls.__name__}, None or a list of layer states, "
                f"got {type(past_key_values).__name__}."
            )
        cache._load([None if entry is None else {**dict.fromkeys(FIELDS), **entry} for entry in past_key_values])
        cache._count(seen_tokens)
        return cache

    def _load(self, entries: list[State | None]) -> None:
        for entry in entries:
            layer = FLALayer()
            layer.state = entry
            tensor = first_tensor(entry)
            layer.device = None if tensor is None else tensor.device
            self.layers.append(layer)

    def _count(self, seen_tokens: int) -> None:
        for layer in self.layers:
            layer._seen_tokens = seen_tokens


class Cache(FLACache):
    """The cache that models create for themselves."""


class LegacyFLACache(FLACache):
    """The cache of older versions: a list ``states`` and one token count for all layers.

    The count advances when the first layer is created and, later, when the last layer is updated.
    """

    def __init__(self, seen_tokens: int = 0) -> None:
        super().__init__()
        self.states: list[State] = []
        self._seen_tokens = seen_tokens

    def __repr__(self) -> str:
        return f"{type(self).__name__}(layers={len(self.states)}, seen_tokens={self._seen_tokens})"

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, layer_idx: int) -> State:
        if not 0 <= layer_idx < len(self.states):
            raise KeyError(f"The cache has {len(self.states)} layers, attempted to access layer {layer_idx}.")
        return self.states[layer_idx]

    def __iter__(self) -> Iterator[State]:
        return iter(self.states)

    def _store(self, layer_idx: int, offset: int | None, states: dict[str, Any]) -> State:
        # Built by object.__new__ in some programs: only `states` and `_seen_tokens` can be relied on here.
        layer = FLALayer()
        created = layer_idx >= len(self.states)
        if not created:
            layer.state = self.states[layer_idx]
        state = layer.update(**states)
        if offset is None:
            offset = 1 if states["attn_state"] is None else states["attn_state"][0].shape[1]
        while len(self.states) <= layer_idx:
            self.states.append(dict.fromkeys(FIELDS))
        self.states[layer_idx] = state
        if (created and layer_idx == 0) or (not created and layer_idx == len(self.states) - 1):
            self._seen_tokens += offset
        return state

    def get_seq_length(self, layer_idx: int | None = 0, cache_position: Any = None) -> int:
        """Tokens seen, or 0 for a layer that does not exist."""
        return self._seen_tokens if len(self.states) > (layer_idx or 0) else 0

    def _commit(self, changes: list[Any]) -> None:
        self.states = list(changes)

    def _load(self, entries: list[State | None]) -> None:
        self._commit(entries)

    def _count(self, seen_tokens: int) -> None:
        self._seen_tokens = seen_tokens

    def _transform(self, f: Callable[[Tensor], Tensor]) -> None:
        self._commit([map_tensors(state, f) for state in self.states])

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int = 0) -> tuple[int, int]:
        """``(past + query_length, 0)``."""
        layer = FLALayer()
        layer._seen_tokens = self._seen_tokens
        return layer.get_mask_sizes(query_length)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether the layer (any layer when None) has a state."""
        return len(self.states) > (layer_idx or 0)

    def crop(self, max_length: int) -> None:
        """Not supported."""
        raise NotImplementedError("LegacyFLACache cannot be cropped.")

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Not supported."""
        raise NotImplementedError("LegacyFLACache cannot be offloaded.")

    prefetch = offload

    def reset(self) -> None:
        """Forget all states and the count."""
        self.states, self._seen_tokens = [], 0

    @property
    def is_initialized(self) -> bool:
        return bool(self.states)
