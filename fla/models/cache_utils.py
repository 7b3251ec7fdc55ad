# SPDX-License-Identifier: MIT
"""The cache of a model: per layer, whatever state its mixer carries from token to token.

Every entry has four fields: ``recurrent_state`` (tensors with the sequences on axis 0), ``attn_state`` (tensors with
time on axis 1), ``conv_state`` and ``ffn_state``. Each layer counts its own tokens, so that all layers of one forward
pass see the same past.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fla.models._compat import CacheLayerMixin, HFCache

__all__ = ["Cache", "FLACache", "FLALayer", "LegacyFLACache", "window_concat"]

FIELDS = ("recurrent_state", "attn_state", "conv_state", "ffn_state")

State = dict[str, Any]


def map_tensors(value: Any, f: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with ``f`` applied to every tensor in it: through dicts, tuples, lists and dataclasses.

    Raises:
        NotImplementedError: an object whose tensors cannot be found.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        return f(value)
    if isinstance(value, dict):
        return type(value)((k, map_tensors(v, f)) for k, v in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(v, f) for v in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(v, f) for v in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {x.name: map_tensors(getattr(value, x.name), f) for x in dataclasses.fields(value) if x.init}
        return dataclasses.replace(value, **fields)
    raise NotImplementedError(f"A state of type {type(value).__name__} cannot be transformed.")


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor in ``value``, looked for as :func:`map_tensors` does and in attributes of other objects."""
    if isinstance(value, Tensor):
        return value
    if value is None or isinstance(value, (bool, int, float, str)):
        return None
    parts = value.values() if isinstance(value, dict) else value
    if not isinstance(value, (dict, tuple, list)):
        parts = getattr(value, "__dict__", {}).values()
    return next((found for part in parts if (found := first_tensor(part)) is not None), None)


def window_concat(cached: Tensor, new: Tensor, window: int | None) -> Tensor:
    """``cached ++ new`` along time (axis 1), cut to the last ``window`` steps. Always a new tensor."""
    if window is not None and new.shape[1] >= window:
        return new[:, -window:].clone()
    both = torch.cat([cached, new.to(cached.dtype)], 1)
    return both if window is None or both.shape[1] <= window else both[:, -window:].contiguous()


class FLALayer(CacheLayerMixin):  # type: ignore[misc,valid-type]
    """The state of one layer.

    Attributes:
        state: dict of the four fields, None before the first update and after :meth:`reset`.
        window_size: steps of attention state that are kept; None keeps all.
    """

    is_compileable = False
    is_sliding = False
    is_croppable = False
    supports_early_init = False
    keys = None
    values = None

    def __init__(self) -> None:
        self.state: State | None = None
        self._seen_tokens = 0
        self.window_size: int | None = None
        self.device: torch.device | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(seen_tokens={self._seen_tokens}, window_size={self.window_size})"

    @property
    def is_initialized(self) -> bool:
        """Whether there is a state."""
        return self.state is not None

    @property
    def batch_size(self) -> int:
        """Sequences of the state. Absent (AttributeError) before the first update."""
        tensor = first_tensor(self.state)
        if tensor is None:
            raise AttributeError("batch_size")
        return tensor.shape[0]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Remember the device; states are created by :meth:`update`."""
        self.device = key_states.device

    def update(  # type: ignore[override]
        self,
        *,
        recurrent_state: Any = None,
        attn_state: Any = None,
        conv_state: Any = None,
        ffn_state: Any = None,
        offset: int = 1,
        cache_kwargs: dict[str, Any] | None = None,
        **_: Any,
    ) -> State:
        """Store new states and return the entry. A field that is None keeps its previous value.

        Args:
            attn_state: tuple of tensors ``[B, T, ...]`` for the new tokens, appended to those kept.
            offset: number of new tokens; ``attn_state``, when given, is counted instead.
            cache_kwargs: ``window_size`` limits the attention state from now on.

        Raises:
            ValueError: an ``attn_state`` that is no tuple or list. Nothing is stored then.
        """
        if attn_state is not None and not isinstance(attn_state, (tuple, list)):
            raise ValueError(f"`attn_state` must be a tuple or list of tensors, got {type(attn_state).__name__}.")
        window = (cache_kwargs or {}).get("window_size", self.window_size)
        state = dict.fromkeys(FIELDS) if self.state is None else self.state
        if attn_state is not None:
            offset = attn_state[0].shape[1]
            kept = state["attn_state"]
            if kept is None:
                attn_state = tuple(x if window is None else x[:, -window:].contiguous() for x in attn_state)
            else:
                attn_state = tuple(window_concat(c, x, window) for c, x in zip(kept, attn_state, strict=True))
        given = {
            "recurrent_state": recurrent_state,
            "attn_state": attn_state,
            "conv_state": conv_state,
            "ffn_state": ffn_state,
        }
        state.update((k, v) for k, v in given.items() if v is not None)
        self.state, self.window_size, self.is_sliding = state, window, window is not None
        self._seen_tokens += offset
        tensor = first_tensor(state)
        self.device = self.device if tensor is None else tensor.device
        return state

    def get_seq_length(self, cache_position: Any = None) -> int:
        """Tokens seen, including those that a window has dropped."""
        return self._seen_tokens

    def get_max_length(self) -> int:
        """-1: there is no maximum."""
        return -1

    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """``(key length, offset of the first key)`` for ``query_length`` new tokens (or their positions)."""
        if isinstance(query_length, Tensor):
            query_length = query_length.shape[0]
        cached = self._seen_tokens
        if self.window_size is not None:
            cached = min(cached, self.window_size - 1)
        return cached + query_length, self._seen_tokens - cached

    def _transform(self, f: Callable[[Tensor], Tensor]) -> None:
        self.state = map_tensors(self.state, f)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the sequences ``beam_idx``."""
        self._transform(take_rows(beam_idx))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences ``indices``."""
        self._transform(take_rows(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence ``repeats`` times."""
        self._transform(lambda x: x.repeat_interleave(repeats, 0))

    def cropped(self, max_length: int) -> tuple[State | None, int]:
        """The state and the count after :meth:`crop`, without changing anything."""
        length = max_length if max_length > 0 else self._seen_tokens + max_length
        if length < 0:
            raise ValueError(f"`max_length` removes more than the {self._seen_tokens} tokens seen, got {max_length}.")
        if self.state is None or length >= self._seen_tokens:
            return self.state, self._seen_tokens
        for name in ("recurrent_state", "conv_state", "ffn_state"):
            if self.state[name] is not None:
                raise NotImplementedError(f"`{name}` cannot be rolled back to an earlier token.")
        if self.window_size is not None and self._seen_tokens > self.window_size:
            raise NotImplementedError(
                f"{self._seen_tokens} tokens went through a window of {self.window_size}: earlier steps are gone."
            )
        return {**self.state, "attn_state": map_tensors(self.state["attn_state"], lambda x: x[:, :length])}, length

    def crop(self, max_length: int) -> None:
        """Keep the first ``max_length`` tokens; negative removes that many from the end, 0 removes none.

        Raises:
            NotImplementedError: states that cannot be rolled back, or a window that has dropped steps.
        """
        self.state, self._seen_tokens = self.cropped(max_length)

    def offload(self) -> None:
        """Move the state to the CPU."""
        self._transform(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move the state back to the device it came from."""
        device = self.device
        if device is not None:
            self._transform(lambda x: x.to(device, non_blocking=True))

    def reset(self) -> None:
        """Forget the state and the count."""
        self.state, self._seen_tokens = None, 0


def take_rows(indices: Tensor) -> Callable[[Tensor], Tensor]:
    """Function that selects ``indices`` on axis 0."""
    return lambda x: x.index_select(0, indices.to(x.device))


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
            torch.nn.Module.__init__(self)
        self.layers: list[FLALayer] = []
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
        while len(self.layers) <= layer_idx:
            layer = FLALayer()
            layer._seen_tokens = self._initial_tokens
            self.layers.append(layer)
        return self.layers[layer_idx].update(
            recurrent_state=recurrent_state,
            attn_state=attn_state,
            conv_state=conv_state,
            ffn_state=ffn_state,
            offset=1 if offset is None else offset,
            cache_kwargs=cache_kwargs,
            **kwargs,
        )

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

    def update(
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
        layer = FLALayer()
        created = layer_idx >= len(self.states)
        if not created:
            layer.state = self.states[layer_idx]
        state = layer.update(
            recurrent_state=recurrent_state,
            attn_state=attn_state,
            conv_state=conv_state,
            ffn_state=ffn_state,
            cache_kwargs=cache_kwargs,
        )
        if offset is None:
            offset = attn_state[0].shape[1] if attn_state is not None else 1
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

    _load = _commit

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
