# SPDX-License-Identifier: MIT
"""The state of one layer in a cache, and what can be done to states of any shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fla.models._compat import CacheLayerMixin

__all__ = ["FIELDS", "FLALayer", "State", "first_tensor", "map_tensors", "take_rows", "window_concat"]

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


class FLALayer(CacheLayerMixin):
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
    def is_initialized(self) -> bool:  # type: ignore[override]
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
